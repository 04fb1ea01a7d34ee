"""First values of a model: the same on every mesh, nothing left out, nothing overwritten that had values."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.internals.materialize import materialize_module
from d9d.module.parallelism.api import parallelize_fsdp, parallelize_hsdp, parallelize_replicate
from tests.harness.parity import assert_close_tree, full

CPU = torch.device("cpu")
SEED = 11


class Delegating(nn.Module):
    """Lets each layer initialise itself, and its own parameters and buffers after that."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=2)
        self.layers = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 3)])
        self.lstm = nn.LSTM(3, 2, num_layers=2)
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.empty(3))
        self.gate = nn.Parameter(torch.empty(5, 3))
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.register_buffer("mask", torch.empty(3, dtype=torch.bool))

    def reset_parameters(self) -> None:
        for module in (self.embedding, *self.layers, self.lstm, self.norm):
            module.reset_parameters()
        nn.init.trunc_normal_(self.scale)
        self.gate = nn.Parameter(torch.rand(5, 3, dtype=self.gate.dtype))  # not in place
        self.table.copy_(torch.arange(4))
        self.count.zero_()
        mask = torch.zeros(3, dtype=torch.bool)
        mask[1] = True
        self.mask = mask


class RootDriven(nn.Module):
    """Initialises the parameters of its children directly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight)
                nn.init.uniform_(module.bias, -1, 1)


class Orthogonal(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)
        nn.init.zeros_(self.bias)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        self.head.reset_parameters()
        self.embedding.reset_parameters()


class TiedToTheRoot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5, bias=False)
        self.weight = self.head.weight

    def reset_parameters(self) -> None:
        self.head.reset_parameters()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "delegating": Delegating,
    "root-driven": RootDriven,
    "orthogonal": lambda: Orthogonal(5, 3),
    "tied": Tied,
    "tied to the root": TiedToTheRoot,
}


def build_on_meta(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        return build().to(dtype)


def values_of(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    return {name: full(tensor.detach()).clone() for name, tensor in tensors.items()}


def plain_values(kind: str, seed: int = SEED) -> dict[str, torch.Tensor]:
    module = build_on_meta(MODELS[kind])
    materialize_module(module, CPU, seed)
    return values_of(module)


PLANS: dict[str, dict[str, int]] = {
    "replicate": {"data_parallel_replicate": 4},
    "shard": {"data_parallel_shard": 4},
    "hybrid": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
}


@pytest.mark.world_size(4)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("plan", PLANS)
def test_values_do_not_depend_on_the_mesh(kind: str, plan: str):
    module = build_on_meta(MODELS[kind])
    context = DeviceMeshParameters(**PLANS[plan]).build()
    mesh = context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard"]
    for child in module.children():
        if isinstance(child, nn.LSTM):
            parallelize_hsdp(child, mesh)
    parallelize_hsdp(module, mesh)
    materialize_module(module, CPU, SEED, group=context.data_group)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    assert_close_tree(values_of(module), plain_values(kind), atol=0, rtol=0)
    if "tied" in kind:
        assert len(list(module.parameters())) == 1


def test_values_are_those_of_the_layers_own_code():
    values = plain_values("delegating")
    assert values["table"].tolist() == [0, 1, 2, 3]
    assert values["count"] == 0
    assert values["mask"].tolist() == [False, True, False]
    assert values["embedding.weight"][2].eq(0).all()
    assert values["layers.0.weight"].abs().max() <= 0.5  # 1 / sqrt(4)
    assert values["norm.running_var"].eq(1).all()
    square = plain_values("orthogonal")["weight"]
    torch.testing.assert_close(square @ square.T, torch.eye(3))


def test_values_depend_on_seed_and_name_only():
    first, second = plain_values("delegating"), plain_values("delegating", SEED + 1)
    assert not torch.equal(first["gate"], second["gate"])
    assert not torch.equal(first["layers.0.weight"][:3, :4].flatten()[:6], first["layers.1.weight"].flatten()[:6])
    torch.manual_seed(77)
    assert_close_tree(plain_values("delegating"), first, atol=0, rtol=0)

    class OneLayer(nn.Module):  # as a pipeline rank that builds the second layer only
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"1": nn.Linear(5, 3)})

        def reset_parameters(self) -> None:
            self.layers["1"].reset_parameters()

    module = build_on_meta(OneLayer)
    materialize_module(module, CPU, SEED)
    torch.testing.assert_close(module.layers["1"].weight.detach(), first["layers.1.weight"], atol=0, rtol=0)


def test_random_state_and_the_module_are_left_alone():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    module = build_on_meta(Delegating)
    materialize_module(module, CPU, SEED)
    assert torch.equal(torch.get_rng_state(), state)
    assert all("reset_parameters" not in vars(child) for child in module.modules())
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.world_size(2)
def test_low_precision():
    module = build_on_meta(Delegating, torch.bfloat16)
    mesh = DeviceMeshParameters(data_parallel_shard=2).build().mesh_for(DENSE_DOMAIN)["dp_cp_shard"]
    parallelize_fsdp(module, mesh)
    materialize_module(module, CPU, SEED)
    plain = build_on_meta(Delegating, torch.bfloat16)
    materialize_module(plain, CPU, SEED)
    assert plain.scale.dtype == torch.bfloat16
    assert_close_tree(values_of(module), values_of(plain), atol=0, rtol=0)


class WithTable(nn.Module):
    """Has a table, and a frozen parameter, that the constructor computes on a real device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(3.0, device="cpu"), persistent=False)
        self.register_buffer("flags", torch.tensor([True, False], device="cpu"))
        self.frozen = nn.Parameter(torch.tensor([5.0, 6.0, 7.0], device="cpu"), requires_grad=False)

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("plan", ["none", "replicate", "shard"])
def test_what_has_values_keeps_them(plan: str):
    module = build_on_meta(WithTable)
    table = module.table
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    mesh = context.mesh_for(DENSE_DOMAIN)["dp_cp_shard"]
    if plan == "replicate":
        parallelize_replicate(module, mesh)
    elif plan == "shard":
        parallelize_fsdp(module.linear, mesh)
    for _ in range(3):  # memory that was used before
        torch.full((64,), torch.nan)
    materialize_module(module, CPU, SEED)
    assert module.table is table
    assert module.table.tolist() == [0, 1, 2]
    assert module.flags.tolist() == [True, False]
    assert full(module.get_parameter("frozen")).tolist() == [5, 6, 7]
    assert not module.get_parameter("frozen").requires_grad
    assert not full(module.linear.weight).isnan().any()


class Careless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.forgotten = nn.Parameter(torch.empty(4))
        self.partly = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(2), persistent=False)
        self.register_buffer("number", torch.empty((), dtype=torch.int32))
        self.register_buffer("flag", torch.empty(2, dtype=torch.bool))
        self.register_buffer("fine", torch.empty(2, dtype=torch.bool))

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        self.partly[:2] = 1
        self.fine.fill_(False)


UNTOUCHED = r"Careless left 5 parameters or buffers .*: flag, forgotten, number, partly, table\. Initialise"


def test_untouched_tensors_are_named():
    with pytest.raises(RuntimeError, match=UNTOUCHED):
        materialize_module(build_on_meta(Careless), CPU, SEED)


@pytest.mark.world_size(2)
def test_untouched_tensors_are_named_on_all_ranks():
    # `partly` lacks values on the second rank's shard only.
    module = build_on_meta(Careless)
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    parallelize_fsdp(module, context.mesh_for(DENSE_DOMAIN)["dp_cp_shard"])
    with pytest.raises(RuntimeError, match=UNTOUCHED):
        materialize_module(module, CPU, SEED, group=context.data_group)
    dist.barrier()


def test_what_is_loaded_later_needs_no_first_values():
    """Neither a method nor its work, unless something else needs it; what that leaves out is named without the rest."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.head = nn.Linear(2, 1, bias=False)
            self.register_buffer("table", torch.empty(3), persistent=False)

    of_linear = {"linear.weight", "linear.bias"}
    with pytest.raises(TypeError, match=r"no source sets: head\.weight, table\.$"):
        materialize_module(build_on_meta(Layers), CPU, SEED, loaded=of_linear)
    module = build_on_meta(Layers)
    materialize_module(module, CPU, SEED, loaded={*of_linear, "head.weight", "table"})
    assert module.linear.weight.shape == (2, 2)
    assert module.table.device == CPU

    careless = build_on_meta(Careless)
    with pytest.raises(RuntimeError, match=r"left 3 parameters or buffers .*: flag, number, table\."):
        materialize_module(careless, CPU, SEED, loaded={"forgotten", "partly"})


def test_a_root_without_the_method():
    with pytest.raises(TypeError, match=r"Sequential has no reset_parameters\(\).*meta device"):
        materialize_module(build_on_meta(lambda: nn.Sequential(nn.Linear(1, 1))), CPU, SEED)
