"""AdamW with stochastic rounding: replicas, shards, and runs that go on."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.core.placement import local_tensor
from d9d.module.parallelism.api import parallelize_hsdp
from d9d.optim import localize_optimizer
from d9d.optim.stochastic import StochasticAdamW


def build() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to(torch.bfloat16)


def set_grads(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()


def train(model: nn.Module, optimizer: StochasticAdamW, steps: range) -> None:
    for step in steps:
        set_grads(model, step)
        optimizer.step()


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_goes_on_alike(own_generator: bool, state_dtype: torch.dtype):
    def optimizer_of(model: nn.Module, seed: int) -> StochasticAdamW:
        generator = torch.Generator().manual_seed(seed) if own_generator else None
        return StochasticAdamW(model.parameters(), lr=0.1, generator=generator, state_dtype=state_dtype)

    model = build()
    optimizer = optimizer_of(model, 0)
    train(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(3, 6))
    again = build()
    again.load_state_dict(saved[0])
    resumed = optimizer_of(again, 1)
    resumed.load_state_dict(saved[1])
    assert all(state["exp_avg"].dtype == state_dtype for state in resumed.state.values())
    train(again, resumed, range(3, 6))
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_steps_and_parameters_draw_numbers_of_their_own():
    """Else an element would be rounded the same way each time, and one of two equal parameters as the other."""
    model = nn.ParameterList([torch.ones(4096, dtype=torch.bfloat16) for _ in range(2)])
    optimizer = StochasticAdamW(model.parameters(), lr=1.0, weight_decay=2.0**-14)
    for _ in range(1000):
        for parameter in model:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    first, second = (parameter.detach().float() for parameter in model)
    assert not torch.equal(first, second)
    assert first.mean().item() == pytest.approx((1 - 2.0**-14) ** 1000, abs=2e-3)


def test_wrong_use_is_refused():
    with pytest.raises(ValueError, match=r"in torch\.float32. It is for bfloat16"):
        StochasticAdamW(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="state_dtype"):
        StochasticAdamW(build().parameters(), lr=0.1, state_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"lr \(-1\)"):
        StochasticAdamW(build().parameters(), lr=-1)
    optimizer = StochasticAdamW(build().parameters(), lr=0.1)
    state = StochasticAdamW(build().parameters(), lr=0.1, generator=torch.Generator()).state_dict()
    with pytest.raises(ValueError, match="do not both have a generator"):
        optimizer.load_state_dict(state)


@pytest.mark.world_size(4)
def test_replicas_of_shards_stay_equal():
    context = DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2).build()
    model = build()
    mesh = context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard"]
    parallelize_hsdp(model, mesh)
    torch.manual_seed(dist.get_rank())  # what a rank draws otherwise does not matter
    optimizer = StochasticAdamW(model.parameters(), lr=0.1)

    def set_local_grads() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

    set_local_grads()
    with pytest.raises(RuntimeError, match="localize_optimizer"):
        optimizer.step()
    assert localize_optimizer(optimizer)
    for _ in range(3):
        set_local_grads()
        optimizer.step()
    for parameter in model.parameters():
        own = local_tensor(parameter).detach().float()
        lowest, highest = own.clone(), own.clone()
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=mesh.get_group("dp_replicate"))
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh.get_group("dp_replicate"))
        assert torch.equal(lowest, highest)
    saved = optimizer.state_dict()
    again = StochasticAdamW(model.parameters(), lr=0.1)
    localize_optimizer(again)
    again.load_state_dict(saved)
    assert all(
        state["exp_avg"].dtype == torch.float32 and torch.equal(state["exp_avg"], optimizer.state[parameter]["exp_avg"])
        for parameter, state in again.state.items()
    )
