"""Sums in buckets: how many collectives, in which order, and which gradients come out, by hand count."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.core.placement import compute_leaf
from d9d.internals.grad_sync import GradientSynchronizer
from d9d.module.parallelism.api import parallelize_hsdp, parallelize_replicate

PAIR = {"data_parallel_replicate": 2}


def mesh_of(**degrees: int) -> torch.distributed.DeviceMesh:
    return DeviceMeshParameters(**degrees).build().mesh_for(DENSE_DOMAIN)


def replicated(module: nn.Module, **degrees: int) -> nn.Module:
    parallelize_replicate(module, mesh_of(**(degrees or PAIR)))
    return module


def bound(module: nn.Module, bucket_size_mb: int = 1) -> GradientSynchronizer:
    synchronizer = GradientSynchronizer([list(module.parameters())], bucket_size_mb)
    synchronizer.bind()
    return synchronizer


class Scalars(nn.Module):
    """One number per parameter; the gradient of each is what the forward pass multiplies it with."""

    def __init__(self, num: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.numbers = nn.ParameterList(torch.ones((), dtype=dtype) for _ in range(num))

    def forward(self, factors: dict[int, float]) -> torch.Tensor:
        return sum(self.numbers[index] * factor for index, factor in factors.items())


def grads(module: nn.Module) -> list[float | None]:
    return [
        None
        if parameter.grad is None
        else parameter.grad.to_local().item()
        if isinstance(parameter, DTensor)
        else parameter.grad.item()
        for parameter in module.parameters()
    ]


def count_all_reduces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the number of elements of each sum from now on."""
    calls: list[int] = []
    original: Callable[..., object] = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        calls.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", counted)
    return calls


@pytest.mark.world_size(2)
def test_one_collective_per_bucket(monkeypatch: pytest.MonkeyPatch):
    # In float32, 1 MiB is 262,144 elements. Filled from the back: 200,000 + 62,144 fill the first bucket to the
    # element, 1 opens the second, 300,000 is larger than any bucket, and 2 must not join it.
    module = nn.ParameterList([torch.zeros(size) for size in (2, 300_000, 1, 62_144, 200_000)])
    replicated(module)
    synchronizer = bound(module)
    calls = count_all_reduces(monkeypatch)
    for _ in range(2):
        synchronizer.set_required_accumulations(1)
        sum(parameter.sum() for parameter in module).backward()
        synchronizer.wait()
        synchronizer.zero_grad()
    # Each bucket carries one more element per parameter, which counts the ranks that used it.
    assert calls == [262_144 + 2, 1 + 1, 300_000 + 1, 2 + 1] * 2


@pytest.mark.world_size(2)
def test_sums_start_while_the_backward_pass_runs(monkeypatch: pytest.MonkeyPatch):
    module = nn.Sequential(*(nn.Linear(300, 300, bias=False) for _ in range(4)))  # 360,000 bytes each: 2 in a bucket
    replicated(module)
    synchronizer = bound(module)
    calls = count_all_reduces(monkeypatch)
    started: list[int] = []
    module[0].register_full_backward_pre_hook(lambda *_: started.append(len(calls)))
    synchronizer.set_required_accumulations(1)
    module(torch.ones(1, 300, requires_grad=True)).sum().backward()
    assert started == [1]  # the bucket of the last two layers
    assert len(calls) == 2
    synchronizer.wait()
    assert len(calls) == 2


@pytest.mark.world_size(2)
def test_ranks_may_reach_parameters_in_different_orders():
    module = replicated(nn.ParameterList([torch.ones(300_000), torch.ones(300_001)]))  # a bucket each
    synchronizer = bound(module)
    order = (0, 1) if dist.get_rank() else (1, 0)
    synchronizer.set_required_accumulations(2)
    for index in order:
        (module[index].sum() * (index + 1)).backward()
        (module[index].sum() * (index + 1)).backward()
    synchronizer.wait()
    for index in (0, 1):
        assert module[index].grad.eq(4 * (index + 1)).all()


@pytest.mark.world_size(2)
def test_unused_on_one_rank_and_on_all():
    module = replicated(Scalars(4))
    synchronizer = bound(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, weight_decay=0.1)
    rank = dist.get_rank()
    synchronizer.set_required_accumulations(1)
    module({0: 3.0, 1: 5.0} if rank == 0 else {0: 4.0, 2: 6.0}).backward()
    synchronizer.wait()
    assert grads(module) == [7.0, 5.0, 6.0, None]
    optimizer.step()
    synchronizer.zero_grad()
    # 1 - 0.5 * (grad + 0.1 * 1); the last is left alone, also by weight decay.
    values = [parameter.to_local().item() for parameter in module.parameters()]
    assert values == pytest.approx([-2.55, -1.55, -2.05, 1.0], abs=1e-12)

    synchronizer.set_required_accumulations(1)
    module({3: 2.0} if rank == 0 else {3: 1.0}).backward()
    synchronizer.wait()
    assert grads(module) == [None, None, None, 3.0]
    synchronizer.zero_grad()

    synchronizer.set_required_accumulations(1)
    synchronizer.wait()  # no backward pass at all
    assert grads(module) == [None] * 4
    synchronizer.zero_grad()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.world_size(2)
def test_accumulation_sums_once(monkeypatch: pytest.MonkeyPatch):
    module = replicated(Scalars(3))
    synchronizer = bound(module)
    calls = count_all_reduces(monkeypatch)
    rank = dist.get_rank()
    for _ in range(2):
        synchronizer.set_required_accumulations(0)
        module({0: 1.0, 1: 2.0}).backward()
        module({0: 1.0}).backward()
        assert calls == []
        synchronizer.set_required_accumulations(1)
        module({0: 10.0 * (rank + 1)}).backward()  # 1 is used in an earlier microbatch only
        synchronizer.wait()
        assert grads(module) == [4.0 + 30.0, 4.0, None]
        assert calls == [3 + 3]
        synchronizer.zero_grad()
        calls.clear()


@pytest.mark.world_size(2)
def test_zero_grad_begins_a_new_pack():
    # A loop of the user that says once how many backward passes a step has.
    module = replicated(Scalars(1))
    synchronizer = bound(module)
    synchronizer.set_required_accumulations(2)
    for step in (1, 2, 3):
        for _ in range(2):
            module({0: float(step)}).backward()
        synchronizer.wait()
        assert grads(module) == [4.0 * step]
        synchronizer.zero_grad()


@pytest.mark.world_size(2)
def test_gradients_that_moved_away_come_back():
    module = replicated(Scalars(2))
    synchronizer = bound(module)
    leaf = module.numbers[0]
    for _ in range(2):
        synchronizer.set_required_accumulations(0)
        module({0: 100.0, 1: 1.0}).backward()
        leaf.grad = None  # the user throws the first gradient of this parameter away
        synchronizer.set_required_accumulations(1)
        module({0: 2.0, 1: 3.0}).square().backward(create_graph=True)
        synchronizer.wait()
        # d (2 a + 3 b)^2 = 2 * 5 * (2, 3) with a = b = 1, on two ranks; and 1 more from before.
        assert grads(module) == [40.0, 62.0]
        for parameter in module.parameters():
            parameter.grad = None  # as optimizer.zero_grad() does
        synchronizer.zero_grad()
        assert grads(module) == [0.0, 0.0]


@pytest.mark.world_size(4)
def test_sums_over_two_groups(monkeypatch: pytest.MonkeyPatch):
    module = replicated(Scalars(2), data_parallel_replicate=2, context_parallel_replicate=2)
    synchronizer = bound(module)
    calls = count_all_reduces(monkeypatch)
    for _ in range(2):
        synchronizer.set_required_accumulations(1)
        module({0: float(dist.get_rank())} | ({1: 5.0} if dist.get_rank() == 3 else {})).backward()
        synchronizer.wait()
        synchronizer.wait()  # does not sum again
        assert grads(module) == [0.0 + 1 + 2 + 3, 5.0]
        assert len(calls) == 2  # one bucket, two groups
        synchronizer.zero_grad()
        calls.clear()


@pytest.mark.world_size(2)
def test_each_dtype_has_its_buckets(monkeypatch: pytest.MonkeyPatch):
    module = nn.ModuleList([Scalars(2, torch.float64), Scalars(1, torch.bfloat16), Scalars(1, torch.float64)])
    replicated(module)
    synchronizer = bound(module)
    calls = count_all_reduces(monkeypatch)
    synchronizer.set_required_accumulations(1)
    sum(part({0: 2.0}).double() for part in module).backward()
    synchronizer.wait()
    assert grads(module) == [4.0, None, 4.0, 4.0]
    assert calls == [3 + 3, 1 + 1]
    assert [parameter.grad.dtype for parameter in module[1].parameters()] == [torch.bfloat16]


@pytest.mark.world_size(2)
def test_plain_sharded_and_replicated_side_by_side(monkeypatch: pytest.MonkeyPatch):
    mesh = mesh_of(data_parallel_shard=2)
    module = nn.ModuleList(
        [nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)]
    ).double()
    parallelize_replicate(module[1], mesh["dp_cp_shard"])
    parallelize_hsdp(module[2], mesh["dp_cp_shard"])
    synchronizer = bound(module)
    calls = count_all_reduces(monkeypatch)
    synchronizer.set_required_accumulations(1)
    x = torch.full((1, 2), float(dist.get_rank() + 1), dtype=torch.float64)
    sum(layer(x).sum() for layer in module).backward()
    synchronizer.wait()
    assert calls == [6 + 1]
    assert module[0].weight.grad.eq(dist.get_rank() + 1).all()  # nobody sums a plain parameter
    assert module[1].weight.grad.eq(3).all()
    assert module[2].weight.grad.full_tensor().eq(3).all()
    synchronizer.scale_grads(torch.tensor(0.5, dtype=torch.float64))
    assert module[1].weight.grad.eq(1.5).all()
    assert module[2].weight.grad.full_tensor().eq(1.5).all()
    assert sorted(len(part.tensors) for part in synchronizer.local_gradients()) == [1, 2]
    synchronizer.zero_grad()
    assert module[0].weight.grad is None
    assert module[1].weight.grad.eq(0).all()
    assert module[2].weight.grad is None


@pytest.mark.world_size(2)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_layer_used_twice_under_checkpointing(use_reentrant: bool):
    module = replicated(nn.Linear(2, 2, bias=False).double())
    synchronizer = bound(module)
    synchronizer.set_required_accumulations(1)
    x = torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    out = checkpoint(module, x, use_reentrant=use_reentrant) + checkpoint(module, 2 * x, use_reentrant=use_reentrant)
    if use_reentrant:
        # The inner backward passes hand in one gradient each: the bucket is sent with the first.
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            out.sum().backward()
        return
    out.sum().backward()
    synchronizer.wait()
    assert module.weight.grad.eq(6).all()  # 1 + 2, on two ranks


@pytest.mark.world_size(2)
def test_frozen_parameters_and_unbind():
    module = replicated(Scalars(2))
    next(module.parameters()).requires_grad_(False)
    synchronizer = bound(module)
    with pytest.raises(RuntimeError, match="bound already"):
        synchronizer.bind()
    synchronizer.set_required_accumulations(1)
    module({0: 1.0, 1: 2.0}).backward()
    synchronizer.wait()
    assert grads(module) == [None, 4.0]
    synchronizer.unbind()
    assert grads(module) == [None, None]
    module({1: 2.0}).backward()  # no hook is left
    assert module.numbers[1].grad == 2.0
    synchronizer.bind()
    assert grads(module) == [None, 0.0]
    synchronizer.unbind()


@pytest.mark.world_size(2)
def test_a_model_is_freed_though_nobody_has_unbound_it():
    model = replicated(nn.Linear(2, 2).double())
    synchronizer = bound(model)
    synchronizer.set_required_accumulations(2)
    model(torch.ones(1, 2).double()).sum().backward()
    freed = [weakref.ref(compute_leaf(parameter)) for parameter in model.parameters()]
    del model, synchronizer
    gc.collect()
    assert [reference() for reference in freed] == [None, None]


def test_a_bucket_needs_a_size():
    with pytest.raises(ValueError, match=r"bucket_size_mb \(0\) must be positive"):
        GradientSynchronizer([[]], 0)


def test_without_a_mesh_nothing_is_sent(monkeypatch: pytest.MonkeyPatch):
    module = Scalars(2)
    synchronizer = bound(module)
    calls = count_all_reduces(monkeypatch)
    synchronizer.set_required_accumulations(1)
    module({0: 2.0}).backward()
    synchronizer.wait()
    assert grads(module) == [2.0, None]
    assert calls == []
    synchronizer.unbind()


@pytest.mark.world_size(2)
def test_replicas_of_one_rank_have_gradients_too(monkeypatch: pytest.MonkeyPatch):
    # A pipeline without data parallelism: the module computes with leaves, and the optimizer reads the parameters.
    module = Scalars(2)
    parallelize_hsdp(module, mesh_of(pipeline_parallel=2)["dp_replicate", "dp_cp_shard"])
    synchronizer = bound(module)
    calls = count_all_reduces(monkeypatch)
    for _ in range(2):
        synchronizer.set_required_accumulations(2)
        module({0: 2.0}).backward()
        module({0: 3.0}).backward()
        synchronizer.wait()
        synchronizer.wait()
        assert grads(module) == [5.0, None]
        synchronizer.scale_grads(torch.tensor(2.0, dtype=torch.float64))
        assert grads(module) == [10.0, None]
        synchronizer.zero_grad()
    assert calls == []


@pytest.mark.world_size(2)
@pytest.mark.parametrize("degrees", [PAIR, {"pipeline_parallel": 2}])
def test_copies_are_apart_in_the_norm(degrees: dict[str, int]):
    module = Scalars(3)
    parallelize_replicate(module, mesh_of(**degrees)["dp_replicate"])
    copy = list(module.parameters())[1]
    synchronizer = GradientSynchronizer([list(module.parameters())], 1, uncounted=[copy])
    synchronizer.bind()
    synchronizer.set_required_accumulations(1)
    module({0: 1.0, 1: 2.0, 2: 3.0}).backward()
    synchronizer.wait()
    num_replicas = degrees.get("data_parallel_replicate", 1)
    by_count = {part.is_counted: torch.cat(part.tensors).tolist() for part in synchronizer.local_gradients()}
    assert by_count == {True: [3.0 * num_replicas, 1.0 * num_replicas], False: [2.0 * num_replicas]}
    synchronizer.unbind()


@pytest.mark.world_size(2)
def test_gradients_of_split_layers_are_laid_out_like_their_parameters():
    """Autograd leaves whole gradients of shards, and partial sums of what all peers have."""
    mesh = DeviceMeshParameters(tensor_parallel=2).build().mesh_for(DENSE_DOMAIN)["tp"]
    whole = torch.arange(10.0).view(5, 2)
    shard = nn.Parameter(distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)]))
    shard.grad = DTensor.from_local(whole.clone(), mesh, [Replicate()])
    replicated = nn.Parameter(distribute_tensor(torch.zeros(5, 2), mesh, [Replicate()]))
    replicated.grad = DTensor.from_local(whole * (dist.get_rank() + 1), mesh, [Partial()])
    synchronizer = GradientSynchronizer([[shard, replicated]], 1)
    synchronizer.bind()
    synchronizer.wait()
    for parameter, expected in ((shard, whole), (replicated, 3 * whole)):
        assert isinstance(parameter.grad, DTensor)
        assert isinstance(parameter.data, DTensor)
        assert parameter.grad.placements == parameter.data.placements
        assert torch.equal(parameter.grad.full_tensor(), expected)
    shard_norm = sum(part.tensors[0].square().sum() for part in synchronizer.local_gradients() if part.shard_groups)
    dist.all_reduce(shard_norm)
    assert shard_norm == whole.square().sum()
