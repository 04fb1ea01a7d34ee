"""Optimizers on local shards take the steps that torch's own take on full parameters."""

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.module.parallelism.api import parallelize_hsdp, parallelize_replicate
from d9d.optim import localize_optimizer
from tests.harness.parity import FP64_EXACT, assert_close_tree, named_full_parameters

NUM_STEPS = 5

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "adamw loop": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=False),
    "sgd fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    "sgd momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}

Meshes = torch.distributed.DeviceMesh


class Model(nn.Module):
    """A sharded layer with 3 rows and one with 1 row (empty on the second rank), a replicated and a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.sharded = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        self.replicated = nn.Linear(2, 2)
        self.plain = nn.Linear(2, 1)


def build() -> Model:
    torch.manual_seed(4)
    return Model().double()


def dense_mesh() -> Meshes:
    context = DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2).build()
    return context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard"]


def distributed() -> Model:
    model, mesh = build(), dense_mesh()
    parallelize_hsdp(model.sharded, mesh)
    parallelize_replicate(model.replicated, mesh)
    return model


def set_grads(model: nn.Module, step: int) -> None:
    """Give each parameter a gradient that depends on its name and the step; some have none in some steps."""
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if step == 0 and "replicated" in name:
            parameter.grad = None
            continue
        generator = torch.Generator().manual_seed(100 * step + index)
        grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements)
        parameter.grad = grad


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        set_grads(model, step)
        optimizer.step()


def full_state(optimizer: Optimizer) -> dict[str, object]:
    return {str(index): values for index, values in optimizer.state_dict()["state"].items()}


@pytest.mark.world_size(4)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_equal_torch_on_full_parameters(kind: str):
    reference, model = build(), distributed()
    expected, optimizer = OPTIMIZERS[kind](reference.parameters()), OPTIMIZERS[kind](model.parameters())
    assert localize_optimizer(optimizer)
    train(reference, expected, range(NUM_STEPS))
    train(model, optimizer, range(NUM_STEPS))
    close = {"atol": FP64_EXACT, "rtol": FP64_EXACT}
    assert_close_tree(named_full_parameters(model), named_full_parameters(reference), **close)
    assert_close_tree(full_state(optimizer), full_state(expected), **close)


@pytest.mark.world_size(4)
def test_state_is_local_inside_and_distributed_outside():
    model = distributed()
    optimizer = torch.optim.AdamW(model.parameters())
    localize_optimizer(optimizer)
    train(model, optimizer, range(2))
    parameters = list(model.parameters())
    assert all(left is right for left, right in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    assert {id(key) for key in optimizer.state} == {id(parameter) for parameter in parameters}
    for parameter, values in optimizer.state.items():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        assert not isinstance(values["exp_avg"], DTensor)
        assert values["exp_avg"].shape == local.shape
    saved = optimizer.state_dict()
    for index, parameter in enumerate(parameters):
        average = saved["state"][index]["exp_avg"]
        assert isinstance(average, DTensor) == isinstance(parameter, DTensor)
        if isinstance(parameter, DTensor):
            assert (average.shape, average.placements) == (parameter.shape, parameter.placements)
        assert not isinstance(saved["state"][index]["step"], DTensor)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("source", ["distributed", "full"])
def test_a_resumed_run_equals_an_uninterrupted_one(source: str):
    model = distributed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    localize_optimizer(optimizer)
    train(model, optimizer, range(2))
    saved, values = copy.deepcopy(optimizer.state_dict()), named_full_parameters(model)
    if source == "full":
        reference = build()
        plain = torch.optim.AdamW(reference.parameters(), lr=0.1)
        train(reference, plain, range(2))
        saved = plain.state_dict()
    train(model, optimizer, range(2, 4))

    resumed = distributed()
    for name, parameter in resumed.named_parameters():
        value = values[name]
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        parameter.data.copy_(value)
    other = torch.optim.AdamW(resumed.parameters(), lr=0.5)
    localize_optimizer(other)
    train(resumed, other, [7])  # has a state of its own by now
    for name, parameter in resumed.named_parameters():
        value = values[name]
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
        parameter.data.copy_(value)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.1
    train(resumed, other, range(2, 4))
    assert_close_tree(named_full_parameters(resumed), named_full_parameters(model), atol=FP64_EXACT, rtol=FP64_EXACT)


@pytest.mark.world_size(4)
def test_groups_schedules_and_late_parameters():
    reference, model = build(), distributed()
    optimizers = []
    for entry in (reference, model):
        optimizer = torch.optim.AdamW(
            [
                {"params": entry.sharded.parameters(), "lr": 0.1},
                # Not `entry.replicated.weight`, which is the plain tensor that the module computes with.
                {"params": [dict(entry.named_parameters())["replicated.weight"]], "weight_decay": 0.5},
            ],
            lr=0.01,
        )
        localize_optimizer(optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [*entry.plain.parameters()], "lr": 0.2})
                schedule.base_lrs.append(0.2)
            train(entry, optimizer, [step])
            schedule.step()
        optimizers.append(optimizer)
    assert [group["lr"] for group in optimizers[1].param_groups] == [0.1 / 16, 0.01 / 16, 0.2 / 4]
    close = {"atol": FP64_EXACT, "rtol": FP64_EXACT}
    assert_close_tree(named_full_parameters(model), named_full_parameters(reference), **close)
    assert_close_tree(full_state(optimizers[1]), full_state(optimizers[0]), **close)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("as_keyword", [False, True])
def test_closures_see_the_parameters(as_keyword: bool):
    reference, model = build(), distributed()
    for entry in (reference, model):
        optimizer = torch.optim.SGD(entry.parameters(), lr=0.1, momentum=0.9)
        localize_optimizer(optimizer)

        def closure(entry: nn.Module = entry, optimizer: Optimizer = optimizer) -> float:
            mine = list(entry.parameters())
            assert all(left is right for left, right in zip(optimizer.param_groups[0]["params"], mine, strict=True))
            assert all(any(key is parameter for parameter in mine) for key in optimizer.state)
            set_grads(entry, closure.step)
            return 7.0

        for closure.step in range(3):
            assert (optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)) == 7.0
    close = {"atol": FP64_EXACT, "rtol": FP64_EXACT}
    assert_close_tree(named_full_parameters(model), named_full_parameters(reference), **close)


@pytest.mark.world_size(4)
def test_a_step_that_raises_can_be_taken_again():
    reference, model = build(), distributed()
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    localize_optimizer(optimizer)

    def failing() -> float:
        raise InterruptedError

    train(model, optimizer, [1])
    with pytest.raises(InterruptedError):
        optimizer.step(failing)
    optimizer.param_groups[0]["lr"] = "no number"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    train(model, optimizer, [2])
    assert all(
        left is right for left, right in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)
    )
    train(reference, expected, [1, 2])
    close = {"atol": FP64_EXACT, "rtol": FP64_EXACT}
    assert_close_tree(named_full_parameters(model), named_full_parameters(reference), **close)


class OwnAdam(torch.optim.Adam):
    """A subclass may do anything."""


@pytest.mark.world_size(4)
def test_optimizers_that_look_at_whole_parameters_are_left_alone():
    model = distributed()
    matrices = [parameter for parameter in model.sharded.parameters() if parameter.ndim == 2]
    whole: list[Optimizer] = [
        torch.optim.Muon(matrices),
        torch.optim.Adafactor(matrices),
        torch.optim.LBFGS(matrices),
        OwnAdam(matrices),
    ]
    assert not any(localize_optimizer(optimizer) for optimizer in whole)
    assert not localize_optimizer(torch.optim.SGD(model.plain.parameters()))  # nothing to do
    replicated = [parameter for parameter in model.replicated.parameters() if parameter.ndim == 2]
    assert localize_optimizer(torch.optim.Muon(replicated))
    assert localize_optimizer(OwnAdam(replicated))


@pytest.mark.world_size(4)
@pytest.mark.parametrize("kind", ["muon", "adafactor", "lbfgs"])
def test_they_run_on_replicated_parameters(kind: str):
    builders: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
        "muon": lambda parameters: torch.optim.Muon(parameters, lr=0.1),
        "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
        "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
    }
    reference, model = build().replicated, distributed().replicated
    states = []
    for entry in (reference, model):
        optimizer = builders[kind]([parameter for parameter in entry.parameters() if parameter.ndim == 2])
        localize_optimizer(optimizer)

        def closure(entry: nn.Module = entry, optimizer: Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            set_grads(entry, 1)
            return torch.tensor(1.0)

        for _ in range(2):
            optimizer.step(closure)
        states.append(optimizer.state_dict()["state"])
    close = {"atol": FP64_EXACT, "rtol": FP64_EXACT}
    if kind == "muon":  # computes in bfloat16 inside
        close = {"atol": 1e-3, "rtol": 1e-3}
    assert_close_tree(named_full_parameters(model), named_full_parameters(reference), **close)
    assert states[0].keys() == states[1].keys()


@pytest.mark.world_size(2)
def test_gradients_of_another_dtype():
    model = nn.Linear(2, 4, bias=False).to(torch.bfloat16)
    mesh = DeviceMeshParameters(data_parallel_shard=2).build().mesh_for(DENSE_DOMAIN)["dp_cp_shard"]
    parallelize_hsdp(model, mesh)
    [parameter] = model.parameters()
    parameter.data.zero_()
    optimizer = torch.optim.SGD([parameter], lr=0.5, foreach=False)
    assert localize_optimizer(optimizer)
    parameter.grad_dtype = torch.float32
    parameter.grad = distribute_tensor(torch.ones(4, 2), mesh, parameter.placements)
    optimizer.step()
    assert parameter.full_tensor().eq(-0.5).all()


@pytest.mark.world_size(2)
def test_state_for_other_parameters_is_refused_by_torch():
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    larger = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(1, 3)).sum().backward()
    larger.step()
    part = nn.Linear(3, 4)
    parallelize_hsdp(part, context.mesh_for(DENSE_DOMAIN)["dp_cp_shard"])
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    assert localize_optimizer(optimizer)
    with pytest.raises(ValueError, match="doesn't match the size of optimizer's group"):
        optimizer.load_state_dict(larger.state_dict())
