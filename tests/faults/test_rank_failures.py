"""D7: a rank raises, is killed, leaves or hangs, at each place of a job. All ranks end, and all say why."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.failing_job import CULPRIT, MESH, MESSAGE, NO_LIMITS, TORCHRUN_LIMIT_S, run, torchrun
from tests.faults.failing_lightning import fit
from tests.faults.waiting_job import wait_in_store
from tests.harness.jobs import RunningJob, running_job

pytestmark = pytest.mark.timeout_s(400)

START_LIMIT_S = 240.0
END_LIMIT_S = 30.0
"""For a machine that does other things as well: the promise is 10 s, and for hangs 5 s after their limit."""
LIMITS = {"init_timeout": 3, "step_timeout": 3, "save": 3}
OTHER = 1 - CULPRIT

PLACES = {
    "configure": "handlers of event 'train.configuration.start'",
    "load": "loading the checkpoint",
    "step": "step 3, from the loss of microbatch 0 on",
    "save": "saving the checkpoint",
    "validation": "step 3, handlers of event 'train.step.post'",
}
LIGHTNING_PLACES = {
    "configure": "start-up",
    "load": "start-up",
    "step": "step 3, a batch of the train loop",
    "save": "step 3, a batch of the train loop",
    "validation": "a batch of the validate loop",
}
REASONS = {
    # Behind "ValueError: ", or where ranks tell each other of errors "ValueError: on rank 1 of 2: ".
    "raise": MESSAGE,
    # Without an account; or it "has not come this far, or is gone", where it was killed before it was connected.
    "kill": "is gone",
    "exit": "SystemExit: 0",
    "leave": "is gone",
    "sleep": "in fail",
}
CODES = {"raise": 1, "kill": -9, "exit": 0, "leave": 0, "sleep": 1}
SAMPLE = [("raise", "step"), ("sleep", "step")]


def cells(kinds: list[str], places: list[str], sample: list[tuple[str, str]]) -> list[Any]:
    return [
        pytest.param(kind, place, marks=() if (kind, place) in sample else pytest.mark.faults, id=f"{kind}-{place}")
        for kind in kinds
        for place in places
    ]


def end_of(job: RunningJob, folder: Path) -> list[int]:
    failing = folder / "failing"
    job.wait_until(failing.exists, START_LIMIT_S)
    codes = job.wait(END_LIMIT_S)
    print(f"all ranks had ended {time.time() - failing.stat().st_mtime:.1f} s after the failure")
    return codes


def check_reason(job: RunningJob, folder: Path, kind: str, place: str) -> None:
    """Look for the reason in what people see of the rank that has not failed: output, and torchelastic's error file."""
    message = json.loads((folder / f"error-{OTHER}.json").read_text())["message"]["message"]
    for text in ("\n".join(job.output(OTHER).splitlines()[-40:]), message):
        assert f"rank {CULPRIT}" in text
        assert REASONS[kind] in text
        # Ranks that load or save tell each other of errors, and show where by their tracebacks.
        is_agreed = kind == "raise" and place in (PLACES["load"], PLACES["save"])
        if kind not in ("kill", "leave") and not is_agreed:
            assert place in text


@pytest.mark.parametrize(("kind", "place"), cells([*REASONS], [*PLACES], SAMPLE))
def test_all_ranks_end_and_name_the_reason(tmp_path: Path, kind: str, place: str):
    if place == "load":
        with running_job(run, tmp_path, str(tmp_path), "none", "nowhere", NO_LIMITS, MESH) as job:
            assert job.wait(START_LIMIT_S) == [0, 0]
    limits = LIMITS if kind == "sleep" else NO_LIMITS
    with running_job(run, tmp_path, str(tmp_path), kind, place, limits, MESH) as job:
        codes = end_of(job, tmp_path)
        assert codes[OTHER] == 1
        assert codes[CULPRIT] == CODES[kind]
        check_reason(job, tmp_path, kind, PLACES[place])


@pytest.mark.faults
def test_an_error_of_the_thread_that_reads_ahead_counts(tmp_path: Path):
    with running_job(run, tmp_path, str(tmp_path), "raise", "data", NO_LIMITS, MESH) as job:
        assert end_of(job, tmp_path) == [1, 1]
        check_reason(job, tmp_path, "raise", "step 3, reading data")


@pytest.mark.parametrize(
    ("kind", "place"), cells(["raise", "kill", "exit", "sleep"], [*LIGHTNING_PLACES], [("kill", "step")])
)
def test_lightning_ends_all_ranks_too(tmp_path: Path, kind: str, place: str):
    timeout_s = 3.0 if kind == "sleep" else 600.0
    if place == "load":
        with running_job(fit, tmp_path, str(tmp_path), "none", "nowhere", timeout_s) as job:
            assert job.wait(START_LIMIT_S) == [0, 0]
    with running_job(fit, tmp_path, str(tmp_path), kind, place, timeout_s) as job:
        codes = end_of(job, tmp_path)
        assert codes[OTHER] == 1
        assert codes[CULPRIT] == CODES[kind]
        check_reason(job, tmp_path, kind, LIGHTNING_PLACES[place])


@pytest.mark.faults
def test_the_first_step_of_a_fit_has_a_limit_of_its_own(tmp_path: Path):
    """A51: it may take longer than the steps behind it, of which one that sleeps ends the job."""
    timeout_s, init_timeout_s, first_step_s = 3.0, 600.0, 7.0
    with running_job(fit, tmp_path, str(tmp_path), "sleep", "step", timeout_s, init_timeout_s, first_step_s) as job:
        assert end_of(job, tmp_path) == [1, 1]
        check_reason(job, tmp_path, "sleep", LIGHTNING_PLACES["step"])


@pytest.mark.parametrize(
    ("kind", "is_connected", "culprit_keeps_store"),
    [
        ("raise", True, False),
        pytest.param("raise", False, False, marks=pytest.mark.faults),
        pytest.param("kill", True, False, marks=pytest.mark.faults),
        pytest.param("raise", True, True, marks=pytest.mark.faults),
        pytest.param("kill", True, True, marks=pytest.mark.faults),
    ],
)
def test_a_rank_that_waits_in_the_store_hears_of_failures(
    tmp_path: Path, kind: str, is_connected: bool, culprit_keeps_store: bool
):
    """The thread that watches has a connection of its own with the store: that of the process is taken."""
    with running_job(wait_in_store, tmp_path, str(tmp_path), kind, is_connected, culprit_keeps_store) as job:
        codes = end_of(job, tmp_path)
        assert codes[OTHER] == 1
        assert codes[CULPRIT] == CODES[kind]
        check_reason(job, tmp_path, kind, "start-up")


@pytest.mark.faults
@pytest.mark.timeout_s(TORCHRUN_LIMIT_S)
@pytest.mark.parametrize("kind", ["raise", "kill", "sleep"])
def test_the_end_of_what_torchrun_prints_names_the_reason(tmp_path: Path, kind: str):
    code, output = torchrun(tmp_path, kind, LIMITS if kind == "sleep" else NO_LIMITS)
    print(f"torchrun had ended {time.time() - (tmp_path / 'failing').stat().st_mtime:.1f} s after the failure")
    assert code == 1
    end = "\n".join(output.splitlines()[-40:])
    assert f"rank {CULPRIT}" in end
    assert REASONS[kind] in end
    if kind == "raise":
        assert f"rank      : {CULPRIT}" in output[output.rindex("Root Cause") :]


@pytest.mark.faults
@pytest.mark.timeout_s(TORCHRUN_LIMIT_S)
def test_a_job_that_gets_no_further_is_restarted_three_times(tmp_path: Path):
    code, output = torchrun(tmp_path, "raise", NO_LIMITS, "--max-restarts=5")
    assert code == 1
    # The first attempt saves two steps, so the first restart has got further. It resumes, as do those after it.
    assert output.count("resumed from") == 4
    refused = "restarted 4 times in a row without a newer checkpoint (the newest checkpoint is that of step 2)"
    assert refused in output[output.rindex("Root Cause") :]
