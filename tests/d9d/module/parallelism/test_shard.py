"""Sharded and hybrid modules: recorded placements, odd sizes, sums instead of averages."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.internals.grad_sync import GradientSynchronizer
from d9d.module.parallelism.api import parallelize_fsdp, parallelize_hsdp, parallelize_replicate
from tests.harness.parity import (
    FP64_EXACT,
    ReferenceStep,
    assert_close_tree,
    named_full_gradients,
    named_full_parameters,
    reference_step,
)


class Odd(nn.Module):
    """Weights of 3, 1 and 5 rows, so that over 2 shards some are uneven and one is empty on the second rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 1)
        self.third = nn.Linear(1, 5)
        self.unused = nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.tensor(0.7))  # no dimension to shard along
        self.use_all = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.third(self.second(self.first(x).tanh()).tanh()) * self.scale
        return self.unused(y) if self.use_all else y


def build() -> Odd:
    torch.manual_seed(5)
    return Odd().double()


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def batch_of(rank: int) -> torch.Tensor:
    return torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(20 + rank))


def loss_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x).square().sum()


def dense_mesh(**degrees: int) -> torch.distributed.DeviceMesh:
    return DeviceMeshParameters(**degrees).build().mesh_for(DENSE_DOMAIN)


def expected_step(num_ranks: int) -> ReferenceStep:
    return reference_step(build, sgd, [batch_of(rank) for rank in range(num_ranks)], loss_of)


def run_step(module: nn.Module) -> GradientSynchronizer:
    synchronizer = GradientSynchronizer([list(module.parameters())], 1)
    synchronizer.bind()
    synchronizer.set_required_accumulations(1)
    loss_of(module, batch_of(dist.get_rank())).backward()
    synchronizer.wait()
    return synchronizer


def check_step(module: nn.Module, expected: ReferenceStep, *, unused_are_zero: bool) -> None:
    grads = dict(expected.grads)
    if unused_are_zero:
        grads |= {name: torch.zeros_like(value) for name, value in expected.params.items() if "unused" in name}
    assert_close_tree(named_full_gradients(module), grads, atol=FP64_EXACT, rtol=FP64_EXACT)
    sgd(module.parameters()).step()
    assert_close_tree(named_full_parameters(module), expected.params, atol=FP64_EXACT, rtol=FP64_EXACT)


def one_unit(module: Odd, mesh: torch.distributed.DeviceMesh) -> None:
    parallelize_hsdp(module, mesh)


def nested_units(module: Odd, mesh: torch.distributed.DeviceMesh) -> None:
    for child in (module.first, module.second):
        parallelize_hsdp(child, mesh)
    parallelize_hsdp(module, mesh)


def mixed(module: Odd, mesh: torch.distributed.DeviceMesh) -> None:
    parallelize_replicate(module.second, mesh)
    parallelize_hsdp(module.first, mesh, reshard_after_forward=False)
    parallelize_hsdp(module, mesh)


DEGREES = {
    "2x2": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    "shard4": {"data_parallel_shard": 4},
    "replicate4": {"data_parallel_replicate": 4},
    "shard-cp-shard": {"data_parallel_shard": 2, "context_parallel_shard": 2},
    "shard-cp-replicate": {"data_parallel_shard": 2, "context_parallel_replicate": 2},
}
# Every plan on the mesh with both kinds of ranks, every mesh with the plan of both kinds of parameters.
CASES = [
    pytest.param(
        plan,
        degrees,
        id=f"{name}-{plan.__name__}",
        marks=() if name == "2x2" or plan is mixed else pytest.mark.exhaustive,
    )
    for name, degrees in DEGREES.items()
    for plan in (one_unit, nested_units, mixed)
]


@pytest.mark.world_size(4)
@pytest.mark.parametrize(("plan", "degrees"), CASES)
def test_a_step_equals_one_process(plan: Callable[..., None], degrees: dict[str, int]):
    module = build()
    plan(module, dense_mesh(**degrees)["dp_replicate", "dp_cp_shard", "cp_replicate"])
    run_step(module)
    has_fsdp = isinstance(module, FSDPModule)
    assert has_fsdp == ("data_parallel_shard" in degrees)
    # A parameter that FSDP holds counts as zero where it was not used, a replicated one has no gradient.
    check_step(module, expected_step(4), unused_are_zero=has_fsdp)


@pytest.mark.world_size(4)
def test_placements_are_recorded_on_the_whole_mesh():
    module = build()
    mesh = dense_mesh(data_parallel_replicate=2, data_parallel_shard=2)["dp_replicate", "dp_cp_shard", "cp_replicate"]
    nested_units(module, mesh)
    sharded, number = (Replicate(), Shard(0), Replicate()), (Replicate(), Replicate(), Replicate())

    def check() -> None:
        for parameter in module.parameters():
            expected = sharded if parameter.ndim else number
            assert (parameter.device_mesh, parameter.placements) == (mesh, expected)
            if parameter.grad is not None:
                assert (parameter.grad.device_mesh, parameter.grad.placements) == (mesh, expected)

    check()
    synchronizer = run_step(module)
    assert any(parameter.grad is not None for parameter in module.parameters())
    check()
    assert all(tensor.placements == (sharded if tensor.ndim else number) for tensor in module.state_dict().values())
    # Row by row: 3 rows over 2 shards are 2 and 1, 1 row is 1 and 0, 5 are 3 and 2.
    rows = [module.first.weight, module.second.weight, module.third.weight]
    is_second = dist.get_rank() % 2
    assert [weight.to_local().shape[0] for weight in rows] == ([1, 0, 2] if is_second else [2, 1, 3])
    synchronizer.unbind()
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.world_size(2)
def test_gradients_are_sums():
    module = nn.Linear(2, 2, bias=False).double()
    parallelize_fsdp(module, dense_mesh(data_parallel_shard=2)["dp_cp_shard"])
    module(torch.full((1, 2), float(dist.get_rank() + 1), dtype=torch.float64)).sum().backward()
    # d/dW of sum(W x) is x in each row: 1 + 2.
    assert module.weight.grad.full_tensor().eq(3).all()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["bias", "weight"])
def test_a_parameter_that_one_rank_does_not_use(name: str):
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.bias = nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x: torch.Tensor, used: tuple[str, ...]) -> torch.Tensor:
            out = x.clone()
            if "weight" in used:
                out = out * self.weight
            return out + self.bias if "bias" in used else out

    module = Partly()
    parallelize_hsdp(module, dense_mesh(data_parallel_shard=2)["dp_cp_shard"])
    rank = dist.get_rank()
    x = torch.full((3,), float(rank + 1), dtype=torch.float64)
    module(x, ("weight", "bias") if rank else (name,)).sum().backward()
    # The gradient of weight is x, so 2 from rank 1 and 1 from rank 0 if it used it; that of bias is 1 per use.
    expected = {"weight": 2.0 + (name == "weight"), "bias": 1.0 + (name == "bias")}
    assert {key: grad.unique().item() for key, grad in named_full_gradients(module).items()} == expected


@pytest.mark.world_size(2)
def test_policies_pass_through():
    seen: list[torch.dtype] = []

    class Watching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.weight.dtype)
            return super().forward(x)

    module = Watching(4, 4)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parallelize_hsdp(module, dense_mesh(data_parallel_shard=2)["dp_cp_shard"], mp_policy=policy)
    out = module(torch.ones(1, 4))
    out.sum().backward()
    assert seen == [torch.bfloat16]
    assert out.dtype == torch.bfloat16
    assert module.weight.dtype == torch.float32
    assert module.weight.grad.dtype == torch.float32
    assert module.weight.grad.full_tensor().eq(2).all()


@pytest.mark.world_size(2)
def test_parameters_can_be_left_out():
    module = build()
    left_out = set(module.third.parameters())
    parallelize_fsdp(module, dense_mesh(data_parallel_shard=2)["dp_cp_shard"], ignored_params=left_out)
    assert {name for name, value in module.named_parameters() if not isinstance(value, DTensor)} == {
        "third.weight",
        "third.bias",
    }


@pytest.mark.world_size(2)
def test_a_size_of_one_stays_out_of_the_way():
    module = build()
    parallelize_hsdp(module, dense_mesh(data_parallel_replicate=2)["dp_replicate", "dp_cp_shard"])
    assert not isinstance(module, FSDPModule)
    assert all(parameter.placements == (Replicate(), Replicate()) for parameter in module.parameters())
    with CommDebugMode() as calls:
        module(batch_of(0)).sum().backward()
    assert calls.get_total_counts() == 0


@pytest.mark.world_size(4)
def test_wrong_meshes():
    mesh = dense_mesh(data_parallel_replicate=2, data_parallel_shard=2)
    with pytest.raises(ValueError, match=r"one mesh dimension, got .*'dp_replicate', 'dp_cp_shard'"):
        parallelize_fsdp(build(), mesh["dp_replicate", "dp_cp_shard"])
    with pytest.raises(ValueError, match="not 'shards'"):
        parallelize_hsdp(build(), mesh, shard_dim="shards")
