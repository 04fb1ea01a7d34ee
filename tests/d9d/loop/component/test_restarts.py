"""Restarts are counted, and those that bring a job no further are stopped."""

import logging
from pathlib import Path

import pytest
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.launch import RestartEnvironment
from d9d.core.participants import Participants
from d9d.loop.component.restarts import RECORD_NAME, count_restart
from d9d.loop.component.run_checkpoints import RunCheckpoints
from d9d.loop.config import CheckpointingConfig

LOGGER = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)


def start(
    folder: Path,
    attempt: int,
    step: int | None,
    *,
    limit: int = 3,
    run_id: str = "a",
    ranks: Participants | None = None,
    **variables: str,
) -> None:
    elastic = {"RUN_ID": run_id, "RESTART_COUNT": str(attempt), "MAX_RESTARTS": "100"}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {f"TORCHELASTIC_{name}": value for name, value in elastic.items()}.items():
            environment.setenv(name, value)
        for name, value in variables.items():
            environment.setenv(name, value)
        count_restart(ranks or Participants(), folder, step, limit, "max_restarts", LOGGER)


@pytest.mark.parametrize("step", [None, 40])
def test_the_restart_after_three_without_progress_is_refused(tmp_path: Path, step: int | None):
    for attempt in range(4):
        start(tmp_path, attempt, step)
    with pytest.raises(RuntimeError, match="restarted 4 times in a row without a newer checkpoint"):
        start(tmp_path, 4, step)
    with pytest.raises(RuntimeError, match="restarted 5 times"):
        start(tmp_path, 5, step)


def test_a_newer_checkpoint_starts_the_count_anew(tmp_path: Path):
    steps = [None, None, None, 10, 10, 20, 20, 20, 20]
    for attempt, step in enumerate(steps):
        start(tmp_path, attempt, step)
    with pytest.raises(RuntimeError, match="the newest checkpoint is that of step 20"):
        start(tmp_path, len(steps), 20)


def test_a_job_that_is_started_again_by_hand_has_all_its_restarts(tmp_path: Path):
    for attempt in range(4):
        start(tmp_path, attempt, None)
    start(tmp_path, 0, None)  # torchrun calls jobs that nobody names by the same id
    start(tmp_path, 1, None, run_id="a")
    start(tmp_path, 2, None, run_id="b")
    start(tmp_path, 3, None, run_id="b")


def test_no_restart_may_be_without_progress(tmp_path: Path):
    start(tmp_path, 0, 5, limit=0)
    start(tmp_path, 1, 6, limit=0)
    with pytest.raises(RuntimeError, match=r"\(max_restarts, now 0\)"):
        start(tmp_path, 2, 6, limit=0)


def test_a_damaged_count_is_begun_anew(tmp_path: Path):
    (tmp_path / RECORD_NAME).write_text('["a", 1')
    start(tmp_path, 2, None, limit=0)


@pytest.mark.world_size(2)
def test_failures_of_each_node_count(tmp_path: Path):
    """Two nodes of one process, whose agents restart both whenever one fails, and count those of their own alone."""
    group = dist.group.WORLD
    assert group is not None
    for counts in ((0, 0), (0, 1), (0, 2), (1, 2)):
        start(tmp_path, counts[group.rank()], None, ranks=Participants([group]), LOCAL_RANK="0")
    with pytest.raises(RuntimeError, match="restarted 4 times in a row"):
        start(tmp_path, (2, 2)[group.rank()], None, ranks=Participants([group]), LOCAL_RANK="0")


def test_nothing_is_written_where_nobody_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a job step of two tasks, say, of which this process is one on its own
    monkeypatch.delenv("RANK", raising=False)
    count_restart(Participants(), tmp_path, None, 0, "max_restarts", LOGGER)
    assert list(tmp_path.iterdir()) == []


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "5")
    assert RestartEnvironment.read() == RestartEnvironment(run_id="job-7", attempt=2, max_restarts=5)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "two")
    with pytest.raises(ValueError, match="TORCHELASTIC_RESTART_COUNT='two'"):
        RestartEnvironment.read()


def test_a_job_without_checkpoints_counts_no_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in (("RUN_ID", "a"), ("RESTART_COUNT", "1"), ("MAX_RESTARTS", "3")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    (tmp_path / "file").touch()  # no folder can be made there
    config = CheckpointingConfig(save_dir=tmp_path / "file" / "checkpoints", period_steps="disable")
    RunCheckpoints(DeviceMeshParameters().build(), config, "run").count_restart()
