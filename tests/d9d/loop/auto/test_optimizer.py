"""Optimizers by config."""

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.auto import AutoOptimizerConfig, AutoOptimizerProvider
from d9d.loop.control import InitializeOptimizerStageContext

CONFIG = TypeAdapter(AutoOptimizerConfig)


def build(values: dict, model: nn.Module) -> torch.optim.Optimizer:
    context = InitializeOptimizerStageContext(dist_context=DeviceMeshParameters().build(), model=model)
    return AutoOptimizerProvider(CONFIG.validate_python(values))(context)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"name": "adamw", "lr": 0.1}, {"lr": 0.1, "weight_decay": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}),
        ({"name": "adam", "lr": 0.1, "amsgrad": True}, {"weight_decay": 0.0, "amsgrad": True}),
        ({"name": "adam", "lr": 0.1, "decoupled_weight_decay": True}, {"decoupled_weight_decay": True}),
        ({"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "nesterov": True}),
        ({"name": "adamw", "lr": 0.1, "betas": [0.8, 0.9]}, {"betas": (0.8, 0.9)}),
    ],
)
def test_settings_reach_the_optimizer(values, expected):
    (group,) = build(values, nn.Linear(2, 2)).param_groups
    assert {name: group[name] for name in expected} == expected
    assert bool(group["fused"]) == ("momentum" not in expected)


def test_momentum_may_begin_later():
    """A parameter that gets its first gradient later, as when it was frozen at first."""
    model = nn.Linear(1, 1)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer = build({"name": "sgd", "lr": 1.0, "momentum": 0.5}, model)
    model.weight.grad = torch.tensor([[1.0]])
    optimizer.step()
    model.bias.grad = torch.tensor([1.0])
    optimizer.step()
    assert model.weight.item() == -1.0 - (1.0 + 0.5)
    assert model.bias.item() == -1.0


def test_sgd_steps_along_the_gradient():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = build({"name": "sgd", "lr": 0.5}, model)
    model.weight.grad = torch.tensor([[3.0]])
    optimizer.step()
    assert model.weight.item() == 1.0 - 0.5 * 3.0


def test_frozen_parameters_are_left_out():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    (group,) = build({"name": "adamw", "lr": 0.1}, model).param_groups
    assert len(group["params"]) == 1
    assert group["params"][0] is model.weight


def test_a_frozen_model_is_refused():
    with pytest.raises(ValueError, match="Linear has no parameter that requires a gradient"):
        build({"name": "sgd", "lr": 0.1}, nn.Linear(2, 2).requires_grad_(False))


def test_stochastic_adamw():
    config = {"name": "stochastic_adamw", "lr": 0.1, "state_dtype": "bfloat16"}
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = build(config, model)
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}
    with pytest.raises(ValueError, match=r"shape \(2, 2\) in torch.float32. It is for bfloat16"):
        build(config, nn.Linear(2, 2))


@pytest.mark.parametrize(
    "values",
    [
        {"name": "adamw"},
        {"name": "adamw", "lr": -1},
        {"name": "adamw", "lr": 0.1, "betas": (0.9, 1.0)},
        {"name": "adamw", "lr": 0.1, "weight_decay": -1},
        {"name": "sgd", "lr": 0.1, "amsgrad": True},
        {"name": "stochastic_adamw", "lr": 0.1, "state_dtype": "flot32"},
        {"name": "muon", "lr": 0.1},
    ],
)
def test_a_wrong_config_is_refused(values):
    with pytest.raises(ValidationError):
        CONFIG.validate_python(values)
