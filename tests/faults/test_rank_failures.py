"""D7: a rank raises, is killed, leaves or hangs, at each place of a job. All ranks end, and all say why."""

import json
from pathlib import Path

import pytest

from tests.faults.failing_job import CULPRIT, MESSAGE, run
from tests.harness.jobs import RunningJob, running_job

START_LIMIT_S = 90.0
END_LIMIT_S = 30.0
"""For a machine that does other things as well; on a free one, all cells end within 2 s, those with a limit 2 s after it."""
LIMITS = {"init_timeout": 3, "step_timeout": 3, "save": 3}
NO_LIMITS = {"init_timeout": 600, "step_timeout": 600}
PLACES = ("configure", "load", "step", "save", "validation")
KINDS = ("raise", "kill", "exit", "leave", "sleep")
SAMPLE = [("raise", "step"), ("kill", "save"), ("exit", "validation"), ("leave", "configure"), ("sleep", "step")]
ALL = [(kind, place) for kind in KINDS for place in PLACES]

WHERE = {
    "configure": "handlers of event 'train.configuration.start'",
    "load": "loading the checkpoint",
    "step": "step 3, from the loss of microbatch 0 on",
    "save": "saving the checkpoint",
    "validation": "step 3, handlers of event 'train.step.post'",
}
WHY = {
    "raise": f"ValueError: {MESSAGE}",
    "kill": f"rank {CULPRIT} is gone without an account",
    "exit": "SystemExit: 0",
    "leave": f"rank {CULPRIT}",  # gone without an account; it may not even have been connected with the others
    "sleep": "in fail",
}


def cells(kinds_and_places: list[tuple[str, str]]) -> list[object]:
    return [
        pytest.param(*cell, marks=() if cell in SAMPLE else pytest.mark.faults, id="-".join(cell))
        for cell in kinds_and_places
    ]


def errors(folder: Path, rank: int) -> dict[str, dict[str, str]]:
    return json.loads((folder / f"error-{rank}.json").read_text())["message"]


def last_lines(job: RunningJob, rank: int) -> str:
    return "\n".join(job.output(rank).splitlines()[-40:])


@pytest.mark.parametrize(("kind", "place"), cells(ALL))
def test_all_ranks_end_and_name_the_culprit(tmp_path: Path, kind: str, place: str):
    if place == "load":
        with running_job(run, tmp_path, str(tmp_path), "none", "nowhere", NO_LIMITS, MESH) as job:
            assert job.wait(START_LIMIT_S) == [0, 0]
    limits = LIMITS if kind == "sleep" else NO_LIMITS
    with running_job(run, tmp_path, str(tmp_path), kind, place, limits, MESH) as job:
        job.wait_until((tmp_path / "failing").exists, START_LIMIT_S)
        codes = job.wait(END_LIMIT_S)
        other = 1 - CULPRIT
        assert codes[other] == 1
        assert codes[CULPRIT] == {"raise": 1, "kill": -9, "exit": 0, "leave": 0, "sleep": 1}[kind]
        text = last_lines(job, other)
        assert WHY[kind] in text
        if kind not in ("kill", "leave"):
            assert WHERE[place] in text
        message = errors(tmp_path, other)["message"]
        assert WHY[kind] in str(message)


MESH = {"data_parallel_replicate": 2}
