"""Losses and gradients of a step: the loss oracle, its splits, and steps without weight."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from d9d.core.dist_context import DENSE_DOMAIN, REGULAR_DOMAIN, DeviceMeshParameters, DistributedContext
from d9d.loop.component.gradient_clipper import GradientClipper
from d9d.loop.component.gradient_manager import GradientManager
from d9d.loop.component.tracked_modules import TrackedModules, everything
from d9d.loop.config import GradientClippingConfig, GradientManagerConfig
from d9d.module.parallelism.api import parallelize_hsdp, parallelize_replicate
from tests.harness.parity import FP64_EXACT, assert_close_tree, named_full_gradients, named_full_parameters

TOKENS = ((1.0, 3.0), (8.0, 4.0))
LOSSES = ((4.0, 0.0), (1.0, 2.0))
"""Mean loss per token of the microbatches of ranks 0 and 1. (4 + 0 + 8 + 8) / 16 tokens = 1.25."""
NUM_SAMPLES = 8

Microbatch = tuple[torch.Tensor, float | None]


def build(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)


def context_of(**degrees: int) -> DistributedContext:
    return DeviceMeshParameters(**degrees).build()


def distribute(module: nn.Module, context: DistributedContext) -> nn.Module:
    if context.is_distributed:
        parallelize_hsdp(module, context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard"])
    return module


def manager_of(context: DistributedContext, module: nn.Module, **config: object) -> GradientManager:
    return GradientManager(context, TrackedModules(context, [module], everything), GradientManagerConfig(**config))


def samples(count: int = NUM_SAMPLES) -> torch.Tensor:
    return torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def run_backward(manager: GradientManager, start: torch.Tensor, *, is_last: bool) -> None:
    """Run the backward pass of a microbatch on the only stage, as a schedule does."""
    manager.before_backward(0, is_last=is_last, is_split=False)
    start.backward()
    manager.after_backward(0, is_last=is_last, is_split=False)


def run_pack(manager: GradientManager, module: nn.Module, pack: list[Microbatch]) -> None:
    """Run one step's passes as the native loop does."""
    manager.set_required_accumulations(len(pack))
    for index, (x, weight) in enumerate(pack):
        loss = module(x).square().mean()
        start = manager.add_loss_with_weight(loss, None if weight is None else torch.tensor(weight))
        run_backward(manager, start, is_last=index == len(pack) - 1)
    manager.sync_and_scale()


def mean_step(x: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of the plain mean over samples, on one process in one microbatch."""
    module = build()
    loss = module(x).square().mean()
    loss.backward()
    return loss.item(), named_full_gradients(module)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("degrees", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}])
def test_the_loss_oracle(degrees: dict[str, int]):
    context = context_of(**degrees)
    # The loss of a microbatch is (its mean loss per token) * w with w = 1, so its gradient has the same formula.
    module = nn.Linear(1, 1, bias=False).double()
    nn.init.ones_(module.weight)
    manager = manager_of(context, distribute(module, context))
    with manager.install():
        for _ in range(2):  # nothing is carried over
            manager.set_required_accumulations(2)
            for index in range(2):
                loss = module(torch.full((1, 1), LOSSES[context.rank][index], dtype=torch.float64)).sum()
                weighted = manager.add_loss_with_weight(loss, torch.tensor(TOKENS[context.rank][index]))
                assert weighted.item() == LOSSES[context.rank][index] * TOKENS[context.rank][index]
                run_backward(manager, weighted, is_last=index == 1)
            assert manager.has_in_flight_gradients
            manager.sync_and_scale()
            assert manager.should_update()
            assert manager.compute_global_loss().item() == 1.25
            [parameter] = module.parameters()
            assert parameter.grad.full_tensor().item() == 1.25
            manager.zero_grad()
            assert not manager.has_in_flight_gradients


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_equal_splits_make_no_difference(num_microbatches: int, is_weighted: bool):
    context, module = context_of(), build()
    loss, grads = mean_step(samples())
    manager = manager_of(context, module)
    clipper = GradientClipper(context, manager, GradientClippingConfig(max_norm=None))
    with manager.install():
        weight = NUM_SAMPLES / num_microbatches if is_weighted else None
        run_pack(manager, module, [(x, weight) for x in samples().chunk(num_microbatches)])
        assert manager.compute_global_loss().item() == pytest.approx(loss, rel=FP64_EXACT)
        assert_close_tree(named_full_gradients(module), grads, atol=FP64_EXACT, rtol=FP64_EXACT)
        norm = math.sqrt(sum(grad.square().sum().item() for grad in grads.values()))
        assert clipper.clip().item() == pytest.approx(norm, rel=FP64_EXACT)


MESHES = [
    {"data_parallel_replicate": 4},
    {"data_parallel_shard": 4},
    {"data_parallel_replicate": 2, "data_parallel_shard": 2},
]


@pytest.mark.world_size(4)
@pytest.mark.parametrize("degrees", MESHES, ids=["replicate", "shard", "hybrid"])
@pytest.mark.parametrize("keep_sharded", [False, True])
def test_uneven_microbatches_on_every_mesh(degrees: dict[str, int], keep_sharded: bool):
    context = context_of(**degrees)
    # Rank r has one microbatch of r + 1 and one of 2 samples: 3 + 4 + 5 + 6 = 18 samples.
    x = samples(18)
    starts = list(itertools.accumulate((3, 4, 5, 6), initial=0))
    mine = x[starts[context.rank] : starts[context.rank + 1]]
    pack = [(part, float(len(part))) for part in mine.split([context.rank + 1, 2])]
    loss, grads = mean_step(x)
    module = distribute(build(), context)
    manager = manager_of(context, module, fsdp_keep_sharded=keep_sharded)
    clipper = GradientClipper(context, manager, GradientClippingConfig(max_norm=1e-3))
    with manager.install():
        for _ in range(2):
            run_pack(manager, module, pack)
            assert manager.compute_global_loss().item() == pytest.approx(loss, rel=FP64_EXACT)
            assert_close_tree(named_full_gradients(module), grads, atol=FP64_EXACT, rtol=FP64_EXACT)
            norm = math.sqrt(sum(grad.square().sum().item() for grad in grads.values()))
            assert clipper.clip().item() == pytest.approx(norm, rel=FP64_EXACT)
            clipped = {name: grad * (1e-3 / (norm + 1e-6)) for name, grad in grads.items()}
            assert_close_tree(named_full_gradients(module), clipped, atol=FP64_EXACT, rtol=FP64_EXACT)
            manager.zero_grad()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_a_microbatch_without_weight_counts_as_nothing(bad: float):
    context = context_of(data_parallel_replicate=2)
    module = build()
    parallelize_replicate(module, context.mesh_for(DENSE_DOMAIN)["dp_replicate"])
    manager = manager_of(context, module)
    loss, grads = mean_step(samples())
    with manager.install():
        manager.set_required_accumulations(1)
        value = module(samples()).square().mean()
        if context.rank == 1:
            value = value * 0 + bad  # the gradient of the model's part is 0, its value is not
        start = manager.add_loss_with_weight(value, torch.tensor(0.0 if context.rank == 1 else 8.0))
        assert context.rank == 0 or start.item() == 0
        run_backward(manager, start, is_last=True)
        manager.sync_and_scale()
        assert manager.should_update()
        assert manager.compute_global_loss().item() == pytest.approx(loss, rel=FP64_EXACT)
        assert_close_tree(named_full_gradients(module), grads, atol=FP64_EXACT, rtol=FP64_EXACT)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("degrees", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}])
@pytest.mark.parametrize("on_zero_weight", ["skip", "raise"])
def test_a_step_without_weight(degrees: dict[str, int], on_zero_weight: str):
    context = context_of(**degrees)
    module = distribute(build(), context)
    manager = manager_of(context, module, on_zero_weight=on_zero_weight)
    before = named_full_parameters(module)
    optimizer = torch.optim.AdamW(module.parameters())
    with manager.install():
        run_pack(manager, module, [(samples(), 0.0), (samples(), 0.0)])
        assert manager.compute_global_loss().item() == 0.0
        assert all(grad.eq(0).all() for grad in named_full_gradients(module).values())
        if on_zero_weight == "raise":
            with pytest.raises(RuntimeError, match=r"loss weights of all microbatches.*on_zero_weight"):
                manager.should_update()
            return
        assert not manager.should_update()
        manager.zero_grad()
        assert_close_tree(named_full_parameters(module), before, atol=0, rtol=0)
        # The next step is not affected.
        run_pack(manager, module, [(samples(), 1.0), (samples(), 1.0)])
        assert manager.should_update()
        loss, grads = mean_step(samples())
        assert manager.compute_global_loss().item() == pytest.approx(loss, rel=FP64_EXACT)
        assert_close_tree(named_full_gradients(module), grads, atol=FP64_EXACT, rtol=FP64_EXACT)
        optimizer.step()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("weight", [0.0, 2.0])
def test_ranks_without_a_last_stage_decide_alike(weight: float):
    context = context_of(pipeline_parallel=2)
    module = nn.Linear(1, 1, bias=False).double()
    parallelize_replicate(module, context.mesh_for(REGULAR_DOMAIN)["dp_replicate"])
    manager = manager_of(context, module)
    with manager.install():
        manager.set_required_accumulations(1)
        if context.rank == 1:
            loss = module(torch.ones(1, 1, dtype=torch.float64)).sum() * 0 + 3.0
            start = manager.add_loss_with_weight(loss, torch.tensor(weight))
            run_backward(manager, start, is_last=True)
        manager.sync_and_scale()
        assert manager.should_update() == (weight > 0)
        assert manager.compute_global_loss().item() == (3.0 if weight else 0.0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("degrees", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}])
def test_an_interrupted_step_leaves_nothing(degrees: dict[str, int]):
    context = context_of(**degrees)
    module = distribute(build(), context)
    manager = manager_of(context, module)

    def interrupted_step() -> None:
        with manager.install():
            manager.set_required_accumulations(3)
            for _ in range(2):
                loss = manager.add_loss_with_weight(module(samples()).sum() * 100, torch.tensor(5.0))
                run_backward(manager, loss, is_last=False)
            raise InterruptedError

    with pytest.raises(InterruptedError):
        interrupted_step()
    assert all(parameter.grad is None for parameter in module.parameters())
    loss, grads = mean_step(samples())
    for _ in range(2):
        with manager.install():
            run_pack(manager, module, [(samples(), 1.0), (samples(), 3.0)])
            assert manager.compute_global_loss().item() == pytest.approx(loss, rel=FP64_EXACT)
            assert_close_tree(named_full_gradients(module), grads, atol=FP64_EXACT, rtol=FP64_EXACT)
        assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.world_size(2)
def test_gradients_in_another_dtype():
    # 256 + 1 is 256 in bfloat16, which has 8 bits.
    context = context_of(data_parallel_replicate=2)
    module = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    manager = manager_of(context, distribute(module, context), grad_dtype="float32")
    for _ in range(2):
        with manager.install():
            manager.set_required_accumulations(2)
            for index, value in enumerate((256.0, 1.0)):
                loss = module(torch.full((1, 1), value, dtype=torch.bfloat16)).sum()
                run_backward(manager, manager.add_loss_with_weight(loss, None), is_last=index == 1)
            manager.sync_and_scale()
            [parameter] = module.parameters()
            assert parameter.grad.dtype == torch.float32
            assert parameter.grad.full_tensor().item() == 257 / 2


@pytest.mark.world_size(2)
def test_fsdp_makes_gradients_of_its_own_dtype():
    context = context_of(data_parallel_shard=2)
    module = distribute(build(torch.bfloat16), context)
    installed = manager_of(context, module, grad_dtype="float32").install()
    with pytest.raises(NotImplementedError, match=r"grad_dtype \(torch.float32\).*MixedPrecisionPolicy"):
        installed.__enter__()
    with manager_of(context, module, grad_dtype="bfloat16").install():
        pass


@pytest.mark.world_size(2)
def test_parameters_that_nobody_would_sum_are_refused():
    """As tensor parallelism leaves them where replicas are not sharded: distributed, but not over the replicas."""
    context = context_of(data_parallel_replicate=2)
    module = build()
    mesh = context.mesh_for(DENSE_DOMAIN)
    module[0].weight = nn.Parameter(DTensor.from_local(module[0].weight.detach(), mesh["tp"], [Shard(0)]))
    parallelize_replicate(module, mesh["dp_replicate", "dp_cp_shard"])
    manager = manager_of(context, module)
    with (
        pytest.raises(NotImplementedError, match=r"without the data-parallel ranks.*'tp'.*\(5, 3\)"),
        manager.install(),
    ):
        pass
