"""D15: what jobs leave on a machine when they have ended: no process, no thread, no port; and jobs beside each other."""

import contextlib
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.auto import AutoDataConfig, AutoDataProvider
from tests.d9d.loop.run.regression_job import GLOBAL_BATCH_SIZE, Data, build_job, collate
from tests.faults.failing_job import NO_LIMITS, TORCHRUN_LIMIT_S, torchrun
from tests.harness.jobs import running_job

RUN_LIMIT_S = 240.0
END_LIMIT_S = 10.0
_LISTENS = "0A"
"""State of a socket that listens, in /proc/net."""


def listening_ports() -> list[int]:
    """Return the ports that this process listens on."""
    own: set[str] = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one of the listing itself
            own.add(str(descriptor.readlink()))
    found: list[int] = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in own:
                found.append(int(fields[1].rpartition(":")[2], 16))
    return sorted(found)


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("d9d")]


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def train_twice(folder: str) -> None:
    """Run two trainers one after the other, with a loader process each, and tell what they have left."""
    for number in (1, 2):
        own = Path(folder) / str(number)
        own.mkdir(exist_ok=True)
        data = AutoDataConfig(global_batch_size=GLOBAL_BATCH_SIZE, microbatch_size=2, num_workers=1, pin_memory=False)
        build_job(
            DeviceMeshParameters(data_parallel_shard=2),
            own,
            total_steps=3,
            data_provider=AutoDataProvider(lambda _: Data(GLOBAL_BATCH_SIZE * 30, torch.float64), collate, data),
            overrides={
                "checkpointing": {"save_dir": str(own / "saved"), "period_steps": 1, "async_save": True},
            },
        ).trainer.train()
    end_s = time.monotonic() + END_LIMIT_S
    while own_threads() and time.monotonic() < end_s:
        time.sleep(0.05)  # those that watch notice within a fraction of a second that a job is over
    left = {
        "ports": listening_ports(),
        "threads": own_threads(),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
    }
    (Path(folder) / f"left-{os.environ['RANK']}.json").write_text(json.dumps(left))


@pytest.mark.faults
@pytest.mark.timeout_s(RUN_LIMIT_S * 2)
def test_two_trainers_in_one_process_leave_nothing(tmp_path: Path):
    with running_job(train_twice, tmp_path, str(tmp_path)) as job:
        assert job.wait(RUN_LIMIT_S) == [0, 0]
    for rank in range(2):
        left = json.loads((tmp_path / f"left-{rank}.json").read_text())
        assert (left["threads"], left["children"]) == ([], [])
        # Process groups listen as long as their process lives.
        assert not any(is_open(port) for port in left["ports"])
    for number in (1, 2):
        assert (tmp_path / str(number) / "saved" / "job" / "save-3").is_dir()


@pytest.mark.faults
@pytest.mark.timeout_s(TORCHRUN_LIMIT_S)
def test_two_jobs_on_one_machine(tmp_path: Path):
    """They get ports of their own, and the failure of one is not that of the other."""
    folders = [tmp_path / kind for kind in ("raise", "none")]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor() as pool:
        (code, _), (other_code, output) = pool.map(lambda folder: torchrun(folder, folder.name, NO_LIMITS), folders)
    assert (code, other_code) == (1, 0), output
