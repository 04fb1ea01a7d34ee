"""What a step may cost: a fixed number of collectives, and no wait for the device."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from d9d.core.dist_context import DeviceMeshParameters
from tests.d9d.loop.run.regression_job import build_job

HOST_READ = "host read"
QUIET = {
    "logging": {"period_steps": "disable", "tracker": {"provider": "null"}},
    "gc": {"period_steps": "disable"},
    "data_prefetch": {"prefetch_factor": 0},
    "preemption": {"signals": []},
}


class CountOperations(TorchDispatchMode):
    """Counts collectives by name, and the operations by which the host reads a value of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        elif func.overloadpacket is torch.ops.aten._local_scalar_dense:
            self.counts[HOST_READ] += 1
        return func(*args, **(kwargs or {}))


def counts_per_step(
    mesh: DeviceMeshParameters, folder: Path, microbatch_size: int, overrides: dict[str, Any] | None = None
) -> Counter[str]:
    """Return the counts of two further steps, halved: start and end of a job cost something too."""
    counts: list[Counter[str]] = []
    for total_steps in (3, 5):
        job = build_job(
            mesh,
            folder / str(total_steps),
            total_steps=total_steps,
            microbatch_size=microbatch_size,
            overrides=QUIET | (overrides or {}),
        )
        with CountOperations() as mode:
            job.trainer.train()
        counts.append(mode.counts)
    return Counter({name: count / 2 for name, count in (counts[1] - counts[0]).items()})


@pytest.mark.world_size(2)
@pytest.mark.parametrize("microbatch_size", [8, 2], ids=["1-microbatch", "4-microbatches"])
def test_collectives_of_a_replicated_step(tmp_path, microbatch_size):
    found = counts_per_step(DeviceMeshParameters(data_parallel_replicate=2), tmp_path, microbatch_size)
    # One bucket, and loss and weight together. The norm needs none. The host reads nothing.
    assert found == {"allreduce_": 2}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("microbatch_size", [8, 2], ids=["1-microbatch", "4-microbatches"])
def test_collectives_of_a_sharded_step(tmp_path, microbatch_size):
    found = counts_per_step(DeviceMeshParameters(data_parallel_shard=2), tmp_path, microbatch_size)
    gathers = sum(count for name, count in found.items() if "allgather" in name)
    scatters = sum(count for name, count in found.items() if "reduce_scatter" in name)
    # Two units, however many microbatches. One microbatch frees the inner unit after its forward pass.
    assert gathers == (3 if microbatch_size == 8 else 2)
    assert scatters == 2
    # Loss and weight together, and the norm.
    assert found["allreduce_"] == 2
    assert sum(found.values()) == gathers + scatters + 2


@pytest.mark.world_size(2)
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_looking_for_bad_steps_costs_one_collective_and_one_read(tmp_path, policy):
    overrides = {"gradient_manager": {"on_nonfinite": policy}}
    found = counts_per_step(DeviceMeshParameters(data_parallel_replicate=2), tmp_path, 8, overrides)
    # Bucket, loss with weight, and the flag. On the CPU nothing waits for a device.
    assert found == {"allreduce_": 3}
