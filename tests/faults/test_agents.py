"""Two agents of torchrun, as two machines have them: a process of one fails, then one of the other, and all meet again."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0

_JOB = """
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters

folder = Path(sys.argv[1])
context = DeviceMeshParameters(data_parallel_replicate=2).build()
total = torch.ones(1)
dist.all_reduce(total)
with (folder / f"starts-{context.rank}").open("a") as file:
    file.write(f"{total.item()} {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n")
for culprit in (1, 0):
    has_failed = folder / f"{culprit} has failed"
    if not has_failed.exists():
        dist.barrier()  # the other one has looked too
        if context.rank == culprit:
            has_failed.touch()
            os._exit(1)
        time.sleep(600)
"""


def start_agent(folder: Path, node: int, port: int) -> subprocess.Popen[bytes]:
    options = f"--nnodes=2 --nproc-per-node=1 --max-restarts=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:{port}"
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options.split(), "--rdzv-id=job", folder / "job.py", folder],
        stdout=(folder / f"output-{node}").open("w"),
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.faults
@pytest.mark.timeout_s(3 * LIMIT_S)
def test_nodes_that_have_counted_different_numbers_of_restarts_meet(tmp_path: Path):
    (tmp_path / "job.py").write_text(_JOB)
    with socket.create_server(("localhost", 0)) as server:
        port: int = server.getsockname()[1]
    agents = [start_agent(tmp_path, node, port) for node in range(2)]
    try:
        codes = [agent.wait(LIMIT_S) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait(LIMIT_S)
    assert codes == [0, 0], "\n".join((tmp_path / f"output-{node}").read_text() for node in range(2))
    starts = [(tmp_path / f"starts-{rank}").read_text().split("\n")[:-1] for rank in range(2)]
    # The one that did not fail was restarted without being counted.
    assert starts == [["2.0 0", "2.0 0", "2.0 1"], ["2.0 0", "2.0 1", "2.0 1"]]
