"""A checkpoint at a path of its own: whatever a killed process leaves, there is a complete one, and nothing else goes."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from d9d.checkpoint import CheckpointPath
from d9d.checkpoint.record import RECORD_NAME, CommitRecord, digest_file

LOGGER = logging.getLogger("test")
POINTS = ("before_commit", "after_record", "between_names", "after_commit")


class KilledError(BaseException):
    """Ends a save as a signal does: nothing that comes after it runs."""


def killed_at(point: str) -> Callable[[str], None]:
    def probe(reached: str) -> None:
        if reached == point:
            raise KilledError

    return probe


def save(path: Path, step: int, probe: Callable[[str], None] = lambda _: None) -> None:
    checkpoint = CheckpointPath(path, LOGGER, probe)
    partial = checkpoint.begin(step)
    (partial / "data").write_text(f"weights of step {step}")
    checkpoint.commit(CommitRecord(step=step, num_ranks=1, files={"data": digest_file(partial / "data")}))


def step_at(path: Path) -> int:
    saved = CheckpointPath(path, LOGGER).complete()
    assert saved.record is not None
    assert saved.record.size_problems(path) == []
    assert (path / "data").read_text() == f"weights of step {saved.step}"
    return saved.step


def complete_ones(folder: Path) -> list[str]:
    """Names that a pattern such as ``last*.ckpt`` finds."""
    return sorted(path.name for path in folder.glob("last*.ckpt") if (path / RECORD_NAME).exists())


@pytest.mark.parametrize("point", POINTS)
def test_the_first_save_to_a_path_that_is_killed(tmp_path: Path, point: str):
    path = tmp_path / "last.ckpt"
    with pytest.raises(KilledError):
        save(path, 1, killed_at(point))
    CheckpointPath(path, LOGGER).recover()
    assert complete_ones(tmp_path) == ([] if point == "before_commit" else ["last.ckpt"])
    save(path, 2)
    assert step_at(path) == 2
    assert [found.name for found in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("point", POINTS)
def test_a_save_over_another_one_that_is_killed(tmp_path: Path, point: str):
    path = tmp_path / "last.ckpt"
    save(path, 1)
    with pytest.raises(KilledError):
        save(path, 2, killed_at(point))
    # Before anything is repaired: whoever looks for last*.ckpt finds one that is complete.
    assert complete_ones(tmp_path) == (["last.replaced.ckpt"] if point == "between_names" else ["last.ckpt"])
    CheckpointPath(path, LOGGER).recover()
    assert step_at(path) == (1 if point == "before_commit" else 2)
    save(path, 3)
    assert step_at(path) == 3
    assert [found.name for found in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_save_that_is_killed_before_its_record_gives_back_what_it_had_replaced(tmp_path: Path):
    """As where the new folder is lost with the machine between the two renames."""
    path = tmp_path / "last.ckpt"
    save(path, 1)
    path.rename(tmp_path / "last.replaced.ckpt")
    CheckpointPath(path, LOGGER).recover()
    assert step_at(path) == 1


def test_what_has_the_path(tmp_path: Path):
    link, target = tmp_path / "link.ckpt", tmp_path / "target.ckpt"
    save(target, 1)
    link.symlink_to(target)
    save(link, 2)
    assert (step_at(link), step_at(target)) == (2, 1)
    assert not link.is_symlink()
    file = tmp_path / "plain.ckpt"
    file.write_text("a file of plain Lightning")
    save(file, 3)
    assert step_at(file) == 3
    folder = tmp_path / "data.ckpt"
    folder.mkdir()
    (folder / "precious").write_text("")
    with pytest.raises(FileExistsError, match="without a commit record"):
        save(folder, 4)
    late = tmp_path / "late.ckpt"
    with pytest.raises(FileExistsError, match="without a commit record"):
        save(late, 4, lambda point: point == "after_record" and shutil.copytree(folder, late))
    assert (folder / "precious").exists()
    assert (late / "precious").exists()


def test_only_checkpoints_and_links_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path, link, file, folder = (tmp_path / name for name in ("a.ckpt", "link.ckpt", "file.ckpt", "data"))
    save(path, 1)
    link.symlink_to(path)
    file.write_text("")
    folder.mkdir()
    for each in (link, file, folder, tmp_path / "missing.ckpt"):
        CheckpointPath(each, LOGGER).remove()
    assert not link.is_symlink()
    assert step_at(path) == 1
    assert file.exists()
    assert folder.exists()
    assert [record.message.split(" is left alone")[0] for record in caplog.records] == [str(file), str(folder)]
    CheckpointPath(path, LOGGER).remove()
    assert sorted(found.name for found in tmp_path.iterdir()) == ["data", "file.ckpt"]


def test_leftovers_of_other_saves_go_after_a_day(tmp_path: Path):
    for name in ("old", "new"):
        with pytest.raises(KilledError):
            save(tmp_path / name, 1, killed_at("before_commit"))
    with pytest.raises(KilledError):
        save(tmp_path / "complete", 1, killed_at("after_record"))
    unfinished = tmp_path / ".unfinished"
    past = time.time() - 25 * 3600
    for name in ("old", "complete"):
        os.utime(unfinished / f"{name}.partial", (past, past))
    save(tmp_path / "mine", 2)
    assert sorted(path.name for path in unfinished.iterdir()) == ["complete.partial", "new.partial"]


def test_a_path_without_a_checkpoint(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"is no checkpoint: it has no commit\.json"):
        CheckpointPath(tmp_path, LOGGER).complete()
    save(tmp_path / "a", 1)
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*/a1\. Did you mean 'a'\?"):
        CheckpointPath(tmp_path / "a1", LOGGER).complete()
    (tmp_path / "a" / RECORD_NAME).write_text("nothing")
    assert "damaged" in CheckpointPath(tmp_path / "a", LOGGER).complete().damage


def test_what_is_replaced_loses_its_name_before_its_files(tmp_path: Path):
    path = tmp_path / "last.ckpt"
    save(path, 1)
    with pytest.raises(KilledError):
        save(path, 2, killed_at("before_removal"))
    assert [found.name for found in tmp_path.glob("last*")] == ["last.ckpt"]
    assert (tmp_path / ".unfinished" / "last.ckpt.removed" / RECORD_NAME).exists()
    save(path, 3)
    assert [found.name for found in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("point", ["before_commit", "after_record", "between_names", "before_removal"])
def test_a_reader_that_looks_while_a_save_gives_the_name(tmp_path: Path, point: str):
    path = tmp_path / "last.ckpt"
    save(path, 1)
    seen: list[int] = []

    def read() -> None:
        CheckpointPath(path, LOGGER).recover()
        seen.append(step_at(path))

    reader = threading.Thread(target=read)

    def probe(reached: str) -> None:
        if reached == point:
            reader.start()
            reader.join(0.3)  # between the names it waits until the save has given them

    save(path, 2, probe)
    reader.join()
    assert seen == [1 if point == "before_commit" else 2]
    assert step_at(path) == 2
    assert [found.name for found in tmp_path.iterdir()] == ["last.ckpt"]
