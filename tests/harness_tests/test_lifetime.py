"""No rank outlives pytest, however pytest ends."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness_tests.pytest_run import start_pytest

pytestmark = pytest.mark.slow

_SAMPLE = """
import os, pathlib, subprocess, sys
import pytest
import torch.distributed as dist

@pytest.mark.world_size(2)
def test_waits():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    pids = pathlib.Path(f"rank-{dist.get_rank()}.tmp")
    pids.write_text(f"{os.getpid()} {child.pid} {os.getppid()}")
    pids.rename(pids.with_suffix(".pids"))
    if dist.get_rank() == 0:
        dist.barrier()
    child.wait()
"""


def test_ranks_and_their_children_end_with_pytest(tmp_path: Path) -> None:
    endings = {"ctrl_c": signal.SIGINT, "kill_9": signal.SIGKILL}
    runs = {}
    for name in endings:  # both at once: most of a run is the import of torch
        (tmp_path / name).mkdir()
        runs[name] = start_pytest(tmp_path / name, _SAMPLE)
    for name, ending in endings.items():
        pids = _wait_for_pids(tmp_path / name)
        runs[name].send_signal(ending)
        runs[name].wait(timeout=60)
        _wait_for(lambda pids=pids: not any(_is_alive(pid) for pid in pids), limit_s=10)


def _wait_for_pids(directory: Path) -> set[int]:
    _wait_for(lambda: len(list(directory.glob("*.pids"))) == 2, limit_s=100)
    pids = {int(pid) for path in directory.glob("*.pids") for pid in path.read_text().split()}
    assert len(pids) == 5  # two ranks, a child of each, the fork server
    return pids


def _wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # An orphan whose new parent does not collect it stays in the table, dead.
    status = Path(f"/proc/{pid}/stat")
    return not (status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z")
