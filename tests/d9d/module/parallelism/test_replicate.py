"""Replicated modules: DTensors to the outside, plain tensors inside, and always the same memory."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.core.placement import compute_leaf
from d9d.internals.grad_sync import GradientSynchronizer
from d9d.module.parallelism.api import parallelize_replicate
from tests.harness.parity import (
    FP64_EXACT,
    assert_close_tree,
    named_full_gradients,
    named_full_parameters,
    reference_step,
)

SEED = 3


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x[:, 0].abs().mul(3).long() % 5
        return self.head(self.embedding(tokens))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(4, 4), torch.randn(4)])
        self.named = nn.ParameterDict({"scale": torch.randn(4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weights[0] + self.weights[1]) * self.named["scale"]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x.unsqueeze(0))[0]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False) + checkpoint(self.block, 2 * x, use_reentrant=False)


class Attention(nn.Module):
    """Uses the weights of a child without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x[None], x[None], x[None], need_weights=False)[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)),
    "tied": Tied,
    "list": Listed,
    "lstm": Recurrent,
    "checkpoint": Checkpointed,
    "attention": Attention,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "norm": lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)),
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(SEED)
    return MODELS[kind]().double()


def batch_of(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 + rank))


def loss_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x).square().sum()


def pair_mesh() -> torch.distributed.DeviceMesh:
    return DeviceMeshParameters(data_parallel_replicate=2).build().mesh_for(DENSE_DOMAIN)["dp_replicate"]


def build_replicated(kind: str = "mlp") -> nn.Module:
    module = build(kind)
    parallelize_replicate(module, pair_mesh())
    return module


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", MODELS)
def test_two_replicas_equal_one_process(kind: str):
    def build_optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    expected = reference_step(lambda: build(kind), build_optimizer, [batch_of(0), batch_of(1)], loss_of)
    module = build_replicated(kind)
    synchronizer = GradientSynchronizer([list(module.parameters())], 1)
    synchronizer.bind()
    synchronizer.set_required_accumulations(1)
    loss = loss_of(module, batch_of(dist.get_rank()))
    loss.backward()
    synchronizer.wait()
    torch.testing.assert_close(loss.detach(), expected.losses[dist.get_rank()], atol=FP64_EXACT, rtol=FP64_EXACT)
    assert_close_tree(named_full_gradients(module), expected.grads, atol=FP64_EXACT, rtol=FP64_EXACT)
    build_optimizer(module.parameters()).step()
    assert_close_tree(named_full_parameters(module), expected.params, atol=FP64_EXACT, rtol=FP64_EXACT)
    # The step is seen by the module's own code, which computes with other tensor objects.
    after = build(kind)
    after.load_state_dict(expected.params, strict=False)
    if kind != "tied":
        torch.testing.assert_close(module(batch_of(0)), after(batch_of(0)), atol=FP64_EXACT, rtol=FP64_EXACT)


@pytest.mark.world_size(2)
def test_inside_is_plain_and_outside_is_not():
    module = build_replicated()
    first = module[0]
    assert not isinstance(first.weight, DTensor)
    assert isinstance(first.weight, nn.Parameter)
    assert first.weight.shape == (6, 4)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    assert all(parameter.placements == (Replicate(),) for parameter in module.parameters())
    assert all(isinstance(tensor, DTensor) for tensor in module.state_dict().values())
    assert list(dict(module.named_parameters())) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    with torch.no_grad():
        dict(module.named_parameters())["0.weight"].fill_(2.0)
    assert first.weight.eq(2).all()
    with torch.no_grad():
        first.weight.fill_(3.0)
    assert module.state_dict()["0.weight"].to_local().eq(3).all()


@pytest.mark.world_size(2)
def test_tied_weights_stay_tied():
    module = build_replicated("tied")
    assert module.head.weight is module.embedding.weight
    assert len(list(module.parameters())) == 1


@pytest.mark.world_size(2)
def test_what_is_replicated_already_stays():
    module = build("mlp")
    mesh = pair_mesh()
    parallelize_replicate(module[0], mesh)
    inner = list(module[0].parameters())
    parallelize_replicate(module, mesh)
    assert [id(parameter) for parameter in module[0].parameters()] == [id(parameter) for parameter in inner]
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    module(batch_of(0)).sum().backward()


@pytest.mark.world_size(2)
def test_load_state_dict():
    module, other = build_replicated(), build("mlp")
    values = {name: torch.full_like(tensor, 0.5) for name, tensor in other.state_dict().items()}
    mesh = next(module.parameters()).device_mesh
    distributed = {name: distribute_tensor(value, mesh, [Replicate()]) for name, value in values.items()}
    expected = torch.func.functional_call(other, values, (batch_of(0),))
    for assign in (False, True):
        fresh = module if not assign else build_replicated()
        fresh.load_state_dict(distributed, assign=assign)
        torch.testing.assert_close(fresh(batch_of(0)), expected, atol=0, rtol=0)
        assert not isinstance(fresh[0].weight, DTensor)
        assert all(isinstance(parameter, DTensor) for parameter in fresh.parameters())


@pytest.mark.world_size(2)
def test_functional_call_uses_what_it_is_given():
    module = build_replicated()
    values = {name: torch.zeros(tensor.shape).double() for name, tensor in module.state_dict().items()}
    before = module(batch_of(0)).detach()
    values["2.bias"] += 7
    values["2.bias"].requires_grad_()
    out = torch.func.functional_call(module, values, (batch_of(0),))
    assert out.eq(7).all()
    out.sum().backward()
    assert values["2.bias"].grad.eq(3).all()  # three samples
    assert all(parameter.grad is None for parameter in module.parameters())
    torch.testing.assert_close(module(batch_of(0)), before, atol=0, rtol=0)


@pytest.mark.world_size(2)
def test_a_copy_computes_with_its_own_values():
    module = build_replicated("lstm")
    before = module(batch_of(0)).detach()
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert twin(batch_of(0)).eq(0).all()  # an LSTM with zero weights keeps its state at 0
    torch.testing.assert_close(module(batch_of(0)), before, atol=0, rtol=0)
    twin(batch_of(0)).sum().backward()
    assert all(compute_leaf(parameter).grad is None for parameter in module.parameters())


@pytest.mark.world_size(2)
def test_a_part_of_a_replicated_module_can_be_copied_and_called_alone():
    module = build_replicated()
    part = module[0]
    x = batch_of(0)
    twin = copy.deepcopy(part)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.fill_(3)
    assert twin(x).eq(3).all()
    assert not part(x).eq(3).all()
    values = {name: torch.full(tensor.shape, 0.5).double() for name, tensor in part.state_dict().items()}
    expected = 0.5 * x.sum(-1, keepdim=True) + 0.5
    torch.testing.assert_close(torch.func.functional_call(part, values, (x,)), expected.expand(-1, part.out_features))
    assert not isinstance(part.weight, DTensor)
    del part.bias
    assert "bias" not in vars(part)


@pytest.mark.world_size(2)
def test_dtype_and_requires_grad_follow():
    module = build_replicated()
    module.float()
    assert module(batch_of(0).float()).dtype == torch.float32
    module.double()
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    module(batch_of(0)).sum().backward()
    assert module[0].weight.grad is None
    assert module[2].weight.grad is not None
    module.requires_grad_(True)
    module(batch_of(0)).sum().backward()
    assert module[0].weight.grad is not None


@pytest.mark.world_size(2)
def test_a_reassigned_parameter_is_the_one_that_counts():
    module = build_replicated()
    mesh = module.state_dict()["0.weight"].device_mesh
    replacement = nn.Parameter(distribute_tensor(torch.zeros(6, 4).double(), mesh, [Replicate()]))
    module[0].weight = replacement
    module[0].bias = nn.Parameter(torch.zeros(6).double())
    # tanh(0) = 0, so only the last bias is left.
    expected = module.state_dict()["2.bias"].to_local().expand(3, 3)
    torch.testing.assert_close(module(batch_of(0)), expected, atol=0, rtol=0)
    assert module.get_parameter("0.bias") is module[0].bias


@pytest.mark.world_size(2)
def test_meta_modules_and_frozen_parameters():
    with torch.device("meta"):
        module = nn.Linear(4, 2)
    module.bias.requires_grad_(False)
    parallelize_replicate(module, pair_mesh())
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not dict(module.named_parameters())["bias"].requires_grad
    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(1.0)
    assert module(torch.ones(1, 4)).eq(5).all()
