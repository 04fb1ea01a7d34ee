"""A job of which one rank waits in the store of the job, and another one fails meanwhile."""

import os
import time
import traceback
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.failures.watch import watching
from tests.faults.failing_job import CULPRIT, FailingTask, fail

CONNECTED_S = 1.0
"""Time for ranks to connect, and for the one that waits to do so."""


def wait_in_store(folder: str, kind: str, is_connected: bool, culprit_keeps_store: bool) -> None:
    """Wait for a key that nobody sets, on all ranks but the culprit.

    Args:
        folder: Where ranks meet.
        kind: How the culprit fails.
        is_connected: Whether it does so when ranks are connected with each other, or before.
        culprit_keeps_store: Whether the store is in its process, as that of rank 0 of a torchrun job may be.
    """
    FailingTask.folder = Path(folder)
    os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/error-{os.environ['RANK']}.json"
    _meet_at_tcp_store(Path(folder), keeper=CULPRIT if culprit_keeps_store else 1 - CULPRIT)
    try:
        with watching(DeviceMeshParameters(data_parallel_replicate=2).build()):
            if dist.get_rank() == CULPRIT:
                time.sleep(CONNECTED_S if is_connected else 0.0)
                fail(kind)
            _get_default_store().get("nobody sets this")
    except BaseException:
        traceback.print_exc()
        raise


def _meet_at_tcp_store(folder: Path, keeper: int) -> None:
    """Meet again, at a store of the kind that torchrun has: each process waits in it with its one connection."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # all have connected, before any of them hangs up
    dist.destroy_process_group()
    told = folder / "port"
    if rank == keeper:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        (folder / "port.tmp").write_text(str(store.port))
        (folder / "port.tmp").rename(told)
    else:
        while not told.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(told.read_text()), size, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
