"""Ranks that a signal ends leave together, however long one of them takes."""

import time

import pytest
import torch.distributed as dist

from d9d.core import preemption
from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.preemption import wait_for_ends


@pytest.mark.world_size(2)
def test_a_rank_that_takes_longer_than_a_step_may_is_waited_for(tmp_path, monkeypatch):
    context = DeviceMeshParameters(data_parallel_replicate=2).build()
    context.set_timeout(1)
    for run in range(2):
        if context.rank == run:
            time.sleep(2)
            (tmp_path / f"log of run {run}").touch()
        wait_for_ends(context)
        assert (tmp_path / f"log of run {run}").exists()
    context.set_timeout(60)
    # One that does not come is not waited for.
    monkeypatch.setattr(preemption, "END_LIMIT_S", 0.1)
    if context.rank == 0:
        wait_for_ends(context)
    dist.barrier()
    if context.rank == 1:
        wait_for_ends(context)


def test_a_process_on_its_own_waits_for_nobody():
    wait_for_ends(DeviceMeshParameters().build())
