"""Locks of directories, and what is left of them when a process is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from d9d.model_state.io.export_lock import LOCK_NAME, DirectoryLock

ROOT = Path(__file__).parents[4]


def test_one_at_a_time(tmp_path: Path):
    lock = DirectoryLock(tmp_path)
    with pytest.raises(OSError, match=rf"another export into .* is in progress, led by process {os.getpid()} on "):
        DirectoryLock(tmp_path)
    lock.release()
    assert list(tmp_path.iterdir()) == []
    other = DirectoryLock(tmp_path)
    # It is not the first one's any more.
    lock.release()
    with pytest.raises(OSError, match="is in progress"):
        DirectoryLock(tmp_path)
    other.release()


def test_a_file_that_somebody_has_left(tmp_path: Path):
    (tmp_path / LOCK_NAME).write_text(f"process 1 on a machine with a {'very ' * 100} long name")
    lock = DirectoryLock(tmp_path)
    assert (tmp_path / LOCK_NAME).read_text().startswith(f"process {os.getpid()} on ")
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout_s(60)
def test_a_process_that_is_killed(tmp_path: Path):
    script = (
        "import sys, time; from pathlib import Path; from d9d.model_state.io.export_lock import DirectoryLock\n"
        "lock = DirectoryLock(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(OSError, match=rf"led by process {process.pid} on "):
            DirectoryLock(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / LOCK_NAME).exists()
    DirectoryLock(tmp_path).release()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        DirectoryLock(tmp_path / "nowhere")
