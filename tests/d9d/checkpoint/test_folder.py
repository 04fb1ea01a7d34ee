"""Names and fates of checkpoints: whatever a killed process leaves, what is complete is found."""

import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from d9d.checkpoint.digest import digest_file
from d9d.checkpoint.folder import CheckpointFolder
from d9d.checkpoint.record import RECORD_NAME, CommitRecord

LOGGER = logging.getLogger("test")
POINTS = ("before_commit", "after_record", "after_commit", "before_purge")


class KilledError(BaseException):
    """Ends a save as a signal does: nothing that comes after it runs."""


def killed_at(point: str) -> Callable[[str], None]:
    def probe(reached: str) -> None:
        if reached == point:
            raise KilledError

    return probe


def save(
    folder: CheckpointFolder, step: int, num_to_keep: int | None = None, metrics: dict[str, float] | None = None
) -> None:
    partial = folder.begin(step)
    (partial / "data").write_text(f"weights of step {step}")
    record = CommitRecord(step=step, num_ranks=1, files={"data": digest_file(partial / "data")}, metrics=metrics or {})
    folder.commit(record)
    folder.purge(step, num_to_keep)


def steps(folder: CheckpointFolder) -> list[int]:
    for saved in folder.complete():
        assert saved.record is not None, saved.damage
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
    folder.purge(7, 2, keep_every_steps=3, keep=[1])
    # 3 and 6 by their number, 1 by name, and the two newest of the others.
    assert steps(folder) == [1, 3, 5, 6, 7]
    folder.purge(7, None)
    assert steps(folder) == [1, 3, 5, 6, 7]
    with pytest.raises(ValueError, match="at least 1"):
        folder.purge(7, 0)


def test_the_best(tmp_path: Path):
    """By hand: of 4, 9, inf, 4, nan."""
    folder = CheckpointFolder(tmp_path, LOGGER)
    for step, value in enumerate((4.0, 9.0, float("inf"), 4.0, float("nan"), None), start=1):
        save(folder, step, metrics={} if value is None else {"score": value})
    assert folder.best_steps(6, "score", "min", 2) == [1, 4]
    assert folder.best_steps(6, "score", "max", 9) == [3, 2, 1, 4]
    assert folder.best_steps(2, "score", "max", 1) == [2]
    assert folder.best_steps(6, "other", "max", 1) == []
    folder.purge(6, 1, spare=[1, 6])
    assert steps(folder) == [1, 6]


@pytest.mark.parametrize(("share_with_group", "mode"), [(False, 0o700), (True, 0o2770)])
def test_who_may_enter(tmp_path: Path, share_with_group: bool, mode: int):
    before = os.umask(0o022)
    try:
        folder = CheckpointFolder(tmp_path / "runs" / "run", LOGGER, share_with_group=share_with_group)
        save(folder, 1)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.path, folder.final_path(1))] == [mode, mode]
    assert stat.S_IMODE((tmp_path / "runs").stat().st_mode) == 0o755
    folder.path.chmod(0o755)  # whoever wants another mode sets it
    save(folder, 2)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o755


def test_a_run_that_went_back_keeps_what_it_writes(tmp_path: Path):
    """The newest by number may be a damaged one that was passed over."""
    folder = CheckpointFolder(tmp_path, LOGGER)
    for step in (10, 20, 30):
        save(folder, step)
    save(folder, 20, num_to_keep=1)
    assert steps(folder) == [20, 30]


def test_damaged_records_and_other_names_are_damaged_checkpoints(tmp_path: Path):
    """They are not passed over in silence: the newest checkpoint is what the run expects to resume from."""
    folder = CheckpointFolder(tmp_path, LOGGER)
    for step in (1, 2, 3):
        save(folder, step)
    (tmp_path / "save-2" / RECORD_NAME).write_bytes(b"x")
    (tmp_path / "save-3").rename(tmp_path / "save-99")
    first, second, other = folder.complete()
    assert first.record is not None
    assert (second.step, second.record) == (2, None)
    assert "is damaged" in second.damage
    assert (other.step, other.record) == (99, None)
    assert "was written as the checkpoint of step 3" in other.damage
    save(folder, 4, num_to_keep=1)
    assert [saved.step for saved in folder.complete()] == [2, 4, 99]  # for people to look at


def test_nothing_that_is_complete_is_lost_where_nobody_recovers(tmp_path: Path):
    folder = CheckpointFolder(tmp_path, LOGGER, killed_at("after_record"))
    with pytest.raises(KilledError):
        save(folder, 2)
    save(CheckpointFolder(tmp_path, LOGGER), 3)
    assert steps(CheckpointFolder(tmp_path, LOGGER)) == [2, 3]


def test_files_that_are_not_there_are_not_committed(tmp_path: Path):
    folder = CheckpointFolder(tmp_path, LOGGER)
    partial = folder.begin(1)
    (partial / "data").write_text("x")
    digest = digest_file(partial / "data")
    with pytest.raises(OSError, match=r"other is missing\. Is .* on a file system that all ranks share"):
        folder.commit(CommitRecord(step=1, num_ranks=2, files={"data": digest, "other": digest}))
    assert folder.complete() == []


def test_something_else_in_the_place_of_a_checkpoint(tmp_path: Path):
    folder = CheckpointFolder(tmp_path, LOGGER)
    (tmp_path / "save-1").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="save-1 is no folder"):
        folder.begin(1)


def test_a_removal_that_is_killed_leaves_nothing(tmp_path: Path):
    folder = CheckpointFolder(tmp_path, LOGGER)
    for step in (1, 2):
        save(folder, step)
    (tmp_path / "save-1").rename(tmp_path / "save-1.removed")  # killed here: the name goes first
    restarted = CheckpointFolder(tmp_path, LOGGER)
    restarted.recover()
    assert steps(restarted) == [2]
    save(restarted, 3)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["save-2", "save-3"]


def test_removal_never_follows_links(tmp_path: Path):
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


def test_what_cannot_be_removed_stops_no_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    folder = CheckpointFolder(tmp_path, LOGGER)
    for step in (1, 2):
        save(folder, step)
    rename = Path.rename

    def denied(self: Path, target: Path) -> Path:
        if target.suffix == ".removed":
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", denied)
    (tmp_path / "save-5").mkdir()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            folder.purge(2, 1)
    assert "could not remove the old checkpoint" in caplog.text
    assert caplog.text.count("save-5 is left alone") == 1
    assert steps(folder) == [1, 2]


def test_a_folder_that_may_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(CheckpointFolder(tmp_path, LOGGER), 1)
    (tmp_path / "save-1").chmod(0o755)
    shutil.copytree(tmp_path / "save-1", tmp_path / "save-2.partial")
    monkeypatch.chdir(tmp_path)  # above it are folders that only their owner may enter
    tmp_path.chmod(0o555)
    user = os.geteuid()
    if user == 0:  # who may write everywhere
        os.seteuid(65534)
    try:
        folder = CheckpointFolder(Path(), LOGGER)
        folder.recover()
        assert [saved.step for saved in folder.complete()] == [1]
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o755)
    assert (tmp_path / "save-2.partial").exists()
