"""Names and fates of checkpoints: whatever a killed process leaves, what is complete is found."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from d9d.checkpoint.folder import CheckpointFolder
from d9d.checkpoint.record import RECORD_NAME, CommitRecord, digest_file

LOGGER = logging.getLogger("test")
POINTS = ("before_commit", "after_record", "after_commit", "before_purge")


class KilledError(BaseException):
    """Ends a save as a signal does: nothing that comes after it runs."""


def killed_at(point: str) -> Callable[[str], None]:
    def probe(reached: str) -> None:
        if reached == point:
            raise KilledError

    return probe


def save(folder: CheckpointFolder, step: int, num_to_keep: int | None = None) -> None:
    partial = folder.begin(step)
    (partial / "data").write_text(f"weights of step {step}")
    record = CommitRecord(step=step, num_ranks=1, files={"data": digest_file(partial / "data")})
    folder.commit(record)
    folder.purge(num_to_keep)


def steps(folder: CheckpointFolder) -> list[int]:
    for saved in folder.complete():
        assert (saved.path / "data").read_text() == f"weights of step {saved.step}"
        assert saved.record.size_problems(saved.path) == []
    return [saved.step for saved in folder.complete()]


@pytest.mark.parametrize("point", POINTS)
def test_a_save_that_is_killed(tmp_path: Path, point: str):
    save(CheckpointFolder(tmp_path, LOGGER), 1)
    with pytest.raises(KilledError):
        save(CheckpointFolder(tmp_path, LOGGER, killed_at(point)), 2, num_to_keep=1)
    restarted = CheckpointFolder(tmp_path, LOGGER)
    restarted.recover()
    # From the record on the new one counts: that is the commit.
    assert steps(restarted) == ([1] if point == "before_commit" else [1, 2])
    save(restarted, 3, num_to_keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["save-3"]


@pytest.mark.parametrize("point", POINTS)
def test_a_save_of_the_same_step_that_is_killed(tmp_path: Path, point: str):
    save(CheckpointFolder(tmp_path, LOGGER), 2)
    with pytest.raises(KilledError):
        save(CheckpointFolder(tmp_path, LOGGER, killed_at(point)), 2, num_to_keep=1)
    restarted = CheckpointFolder(tmp_path, LOGGER)
    restarted.recover()
    assert steps(restarted) == [2]


def test_between_two_names(tmp_path: Path):
    """Killed after the old one has lost its name and before the new one has it."""
    save(CheckpointFolder(tmp_path, LOGGER), 2)
    (tmp_path / "save-2").rename(tmp_path / "save-2.replaced")
    folder = CheckpointFolder(tmp_path, LOGGER)
    folder.recover()
    assert steps(folder) == [2]


def test_what_is_no_checkpoint(tmp_path: Path):
    folder = CheckpointFolder(tmp_path / "run", LOGGER)
    assert folder.complete() == []
    save(folder, 9)
    save(folder, 10)
    run = folder.path
    record = (run / "save-9" / RECORD_NAME).read_bytes()
    for name in (
        "save-41.tmp",
        "save-42.partial",
        "save-",
        "save-4x",
        "xsave-50",
        "save-٤٤",
        "save--5",
        "save-60.removed",
    ):
        (run / name).mkdir()
        (run / name / RECORD_NAME).write_bytes(record)
    (run / "save-61").mkdir()  # without a record
    (run / "save-62").write_text("a file")
    (run / "save-63").symlink_to(run / "save-9")
    assert steps(folder) == [9, 10]  # by number: 9 is the last by name


def test_keeping_some(tmp_path: Path):
    folder = CheckpointFolder(tmp_path, LOGGER)
    for step in range(1, 8):
        save(folder, step)
    folder.purge(2, keep_every_steps=3, keep=[1])
    # 3 and 6 by their number, 1 by name, and the two newest of the others.
    assert steps(folder) == [1, 3, 5, 6, 7]
    folder.purge(None)
    assert steps(folder) == [1, 3, 5, 6, 7]
    with pytest.raises(ValueError, match="at least 1"):
        folder.purge(0)


def test_removal_never_follows_links_and_never_stops_a_job(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = CheckpointFolder(tmp_path / "run", LOGGER)
    victim = tmp_path / "victim"
    save(CheckpointFolder(victim, LOGGER), 1)
    folder.path.mkdir()
    (folder.path / "save-1").symlink_to(victim / "save-1")
    (folder.path / "save-2.partial").symlink_to(victim)
    for step in (3, 4):
        save(folder, step, num_to_keep=1)
    assert steps(folder) == [4]
    assert (victim / "save-1" / "data").exists()
    # A folder in the way of a removal: told, and left.
    (folder.path / "save-4.removed").mkdir()
    (folder.path / "save-4.removed" / "x").write_text("")
    (folder.path / "save-5").mkdir()
    partial = folder.partial_path(6)
    partial.mkdir()
    folder.commit(CommitRecord(step=6, num_ranks=1, files={}))
    with caplog.at_level(logging.WARNING):
        folder.purge(1)
    assert "could not remove the old checkpoint" in caplog.text
    assert "save-5 is left alone" in caplog.text
