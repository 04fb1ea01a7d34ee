"""Packs of microbatches under FSDP: how often units gather and sum, and that nothing leaks into the next step."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.core.fsdp_internals import fsdp_parameters, fsdp_units, gathered_parameter
from d9d.internals.fsdp_accumulation import FsdpAccumulation
from d9d.module.parallelism.api import parallelize_fsdp, parallelize_hsdp
from tests.harness.parity import FP64_EXACT, assert_close_tree, named_full_gradients

NUM_UNITS = 3
"""Two layers and the root."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.last = nn.Linear(3, 1)
        self.num_layers = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: self.num_layers]:
            x = layer(x).tanh()
        return self.last(x)


def build() -> Model:
    torch.manual_seed(1)
    return Model().double()


def sharded() -> Model:
    mesh = DeviceMeshParameters(data_parallel_shard=2).build().mesh_for(DENSE_DOMAIN)["dp_cp_shard"]
    model = build()
    for layer in model.layers:
        parallelize_hsdp(layer, mesh)
    parallelize_hsdp(model, mesh)
    return model


def batch_of(rank: int, microbatch: int) -> torch.Tensor:
    return torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * rank + microbatch))


def run_pack(
    model: Model, accumulation: FsdpAccumulation, num_microbatches: int, stop_after: int | None = None
) -> None:
    accumulation.start_pack(num_microbatches)
    for index in range(num_microbatches):
        loss = model(batch_of(dist.get_rank(), index)).square().sum()
        accumulation.before_backward(is_last=index == num_microbatches - 1)
        loss.backward()
        if index == stop_after:
            raise InterruptedError


def expected_grads(
    num_microbatches: int, prepare: Callable[[Model, int], None] = lambda *_: None
) -> dict[str, torch.Tensor]:
    model = build()
    for rank in range(2):
        for index in range(num_microbatches):
            prepare(model, index)
            model(batch_of(rank, index)).square().sum().backward()
    return named_full_gradients(model)


class Collectives(TorchDispatchMode):
    """Counts collectives by name. (CommDebugMode also tracks modules, and trips over FSDP's hooks.)"""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.world_size(2)
def test_a_pack_gathers_once_and_sums_once():
    model = sharded()
    accumulation = FsdpAccumulation([model])
    for _ in range(2):
        with Collectives() as calls:
            run_pack(model, accumulation, 3)
        assert calls.counts == {"_allgather_base_": NUM_UNITS, "_reduce_scatter_base_": NUM_UNITS}
        assert_close_tree(named_full_gradients(model), expected_grads(3), atol=FP64_EXACT, rtol=FP64_EXACT)
        model.zero_grad()


@pytest.mark.world_size(2)
def test_one_microbatch_and_then_several():
    model = sharded()
    accumulation = FsdpAccumulation([model])
    for number in (1, 2, 1, 3):
        run_pack(model, accumulation, number)
        assert_close_tree(named_full_gradients(model), expected_grads(number), atol=FP64_EXACT, rtol=FP64_EXACT)
        model.zero_grad()


@pytest.mark.world_size(2)
def test_keep_sharded_frees_after_every_microbatch():
    model = sharded()
    accumulation = FsdpAccumulation([model], keep_sharded=True)
    with Collectives() as calls:
        run_pack(model, accumulation, 3)
    # The root stays gathered between forward and backward pass, the layers do not.
    assert calls.counts == {"_allgather_base_": 3 * (2 + 2 + 1), "_reduce_scatter_base_": 3 * NUM_UNITS}
    assert_close_tree(named_full_gradients(model), expected_grads(3), atol=FP64_EXACT, rtol=FP64_EXACT)


@pytest.mark.world_size(2)
def test_a_unit_that_the_last_microbatch_does_not_use():
    model = sharded()
    accumulation = FsdpAccumulation([model])

    def prepare(model: Model, index: int) -> None:
        model.num_layers = 2 if index == 0 else 1

    for _ in range(2):
        accumulation.start_pack(2)
        for index in range(2):
            prepare(model, index)
            loss = model(batch_of(dist.get_rank(), index)).square().sum()
            accumulation.before_backward(is_last=index == 1)
            loss.backward()
        assert_close_tree(named_full_gradients(model), expected_grads(2, prepare), atol=FP64_EXACT, rtol=FP64_EXACT)
        model.zero_grad()


@pytest.mark.world_size(2)
def test_the_step_sees_new_weights_and_so_does_validation():
    model, reference = sharded(), build()
    accumulation = FsdpAccumulation([model])
    optimizer, plain = (torch.optim.SGD(entry.parameters(), lr=0.1) for entry in (model, reference))
    for _ in range(2):
        run_pack(model, accumulation, 2)
        for name, parameter in reference.named_parameters():
            parameter.grad = named_full_gradients(model)[name]
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(
                model(batch_of(0, 9)), reference(batch_of(0, 9)), atol=FP64_EXACT, rtol=FP64_EXACT
            )


@pytest.mark.world_size(2)
def test_an_interrupted_pack_leaves_nothing():
    model = sharded()
    accumulation = FsdpAccumulation([model])
    with pytest.raises(InterruptedError):
        run_pack(model, accumulation, 3, stop_after=1)
    accumulation.abandon_pack()
    model.zero_grad()
    run_pack(model, accumulation, 3)
    assert_close_tree(named_full_gradients(model), expected_grads(3), atol=FP64_EXACT, rtol=FP64_EXACT)


def test_plain_modules_need_nothing():
    accumulation = FsdpAccumulation([nn.Linear(2, 2)])
    accumulation.start_pack(3)
    accumulation.before_backward(is_last=False)
    accumulation.abandon_pack()


@pytest.mark.world_size(2)
def test_passes_of_a_split_schedule_add_up_in_the_dtype_of_the_sums():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parallelize_fsdp(
        model,
        DeviceMeshParameters(data_parallel_shard=2).build().mesh_for(DENSE_DOMAIN)["dp_cp_shard"],
        mp_policy=policy,
    )
    accumulation = FsdpAccumulation([model])
    accumulation.start_pack(3)
    (unit,) = fsdp_units(model)
    model(torch.ones(1, 1))
    (parameter,) = fsdp_parameters(unit)
    gathered = gathered_parameter(parameter)
    assert gathered is not None
    accumulation.before_backward(is_last=False)
    # 256 + 1 + 1 is 256 in bfloat16. Second halves accumulate like this, without FSDP's hooks.
    for index, gradient in enumerate((256.0, 1.0, 1.0)):
        with torch.no_grad():
            addend = torch.full((1, 1), gradient, dtype=torch.bfloat16)
            gathered.grad = addend if gathered.grad is None else gathered.grad + addend
        accumulation.after_split_backward(is_last=index == 2)
    assert named_full_gradients(model)["weight"].item() == 2 * 258.0
