"""Locks of directories, and what is left of them when a process is killed."""

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from d9d.core.directory_lock import DirectoryLock

ROOT = Path(__file__).parents[3]
LOCK_NAME = ".lock"


def lock(directory: Path, wait_s: float = 0.0) -> DirectoryLock:
    return DirectoryLock(directory / LOCK_NAME, f"another job in {directory}", "Wait for it.", wait_s=wait_s)


def test_one_at_a_time(tmp_path: Path):
    first = lock(tmp_path)
    with pytest.raises(
        OSError, match=rf"another job in .* is in progress, led by process {os.getpid()} on .*\. Wait for it"
    ):
        lock(tmp_path)
    first.release()
    assert list(tmp_path.iterdir()) == []
    other = lock(tmp_path)
    # It is not the first one's any more.
    first.release()
    with pytest.raises(OSError, match="is in progress"):
        lock(tmp_path)
    other.release()


def test_a_file_that_somebody_has_left(tmp_path: Path):
    (tmp_path / LOCK_NAME).write_text(f"process 1 on a machine with a {'very ' * 100} long name")
    taken = lock(tmp_path)
    assert (tmp_path / LOCK_NAME).read_text().startswith(f"process {os.getpid()} on ")
    taken.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout_s(60)
def test_a_process_that_is_killed(tmp_path: Path):
    script = (
        "import sys, time; from pathlib import Path; from d9d.core.directory_lock import DirectoryLock\n"
        "lock = DirectoryLock(Path(sys.argv[1]), 'another', ''); print('locked', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / LOCK_NAME)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(OSError, match=rf"led by process {process.pid} on "):
            lock(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / LOCK_NAME).exists()
    lock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        lock(tmp_path / "nowhere")


def test_one_that_ends_is_waited_for(tmp_path: Path):
    held = lock(tmp_path)
    timer = threading.Timer(0.3, held.release)
    timer.start()
    lock(tmp_path, wait_s=30).release()
    timer.join()


def test_one_that_removes_its_directory_is_waited_for(tmp_path: Path):
    """It had made the directory, and leaves nothing there."""
    directory = tmp_path / "made"

    def make() -> None:
        directory.mkdir(exist_ok=True)

    def end() -> None:
        held.release()
        directory.rmdir()

    held = DirectoryLock(directory / LOCK_NAME, "another", "", make_directory=make)
    timer = threading.Timer(0.3, end)
    timer.start()
    taken = DirectoryLock(directory / LOCK_NAME, "another", "", wait_s=30, make_directory=make)
    timer.join()
    assert (directory / LOCK_NAME).exists()
    taken.release()


def test_a_directory_that_goes_between_two_calls(tmp_path: Path):
    directory = tmp_path / "made"
    num_calls = 0

    def make_late() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls > 1:
            directory.mkdir()

    DirectoryLock(directory / LOCK_NAME, "another", "", wait_s=30, make_directory=make_late).release()
    assert num_calls == 2


@pytest.mark.parametrize(("of_directory", "of_file"), [(0o770, 0o660), (0o750, 0o600)])
def test_the_group_may_lock_what_it_may_write_to(tmp_path: Path, of_directory: int, of_file: int):
    """A killed process leaves the file, and another member of the group has to open it."""
    tmp_path.chmod(of_directory)
    umask = os.umask(0o077)
    try:
        taken = lock(tmp_path)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / LOCK_NAME).stat().st_mode) == of_file
    taken.release()
