"""State of optimizers by name: into other orders and groups, with the options that were saved."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import SGD, AdamW, Optimizer

from d9d.optim.named_state import (
    SavedOptions,
    describe_optimizer,
    equal_values,
    load_named_state,
    named_state,
    room_for_state,
    state_problems,
)
from d9d.optim.stochastic import StochasticAdamW

Keys = dict[nn.Parameter, str]


def parameters(*names: str, dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(3, 2, generator=generator, dtype=torch.float64).to(dtype)) for name in names}


def keys_of(named: dict[str, nn.Parameter]) -> Keys:
    return {parameter: name for name, parameter in named.items()}


def step(named: dict[str, nn.Parameter], optimizer: Optimizer, *, without: tuple[str, ...] = ()) -> None:
    for index, (name, parameter) in enumerate(sorted(named.items())):
        parameter.grad = None if name in without else torch.full_like(parameter, index + 1.0)
    optimizer.step()


def move(source: Optimizer, source_keys: Keys, target: Optimizer, target_keys: Keys) -> list[str]:
    """Load what a checkpoint would hold, which has no documents any more when it was read."""
    record = copy.deepcopy(describe_optimizer(source, source_keys))
    saved = SavedOptions.of_optimizers([record])
    assert state_problems(target, target_keys, saved) == []
    return load_named_state(
        target, target_keys, copy.deepcopy(named_state(source, source_keys)), saved, record["others"]
    )


def test_another_order_of_parameters_goes_on_as_if_nothing_had_happened():
    first = parameters("a", "b", "c")
    optimizer = AdamW(first.values(), lr=0.1)
    step(first, optimizer)
    second = {name: nn.Parameter(first[name].detach().clone()) for name in ("c", "a", "b")}
    other = AdamW([{"params": [second["c"]]}, {"params": [second["b"], second["a"]]}], lr=0.1)
    assert move(optimizer, keys_of(first), other, keys_of(second)) == []
    for _ in range(2):
        step(first, optimizer)
        step(second, other)
    for name, parameter in first.items():
        assert torch.equal(parameter, second[name])


def test_a_parameter_without_gradients_has_no_state_and_starts_fresh():
    first = parameters("used", "unused")
    optimizer = AdamW(first.values(), lr=0.1)
    step(first, optimizer, without=("unused",))
    assert list(named_state(optimizer, keys_of(first))) == ["used"]
    assert describe_optimizer(optimizer, keys_of(first))["groups"][0]["parameters"] == {
        "used": ["step", "exp_avg", "exp_avg_sq"],
        "unused": [],
    }
    second = parameters("used", "unused")
    other = AdamW(second.values(), lr=0.1)
    move(optimizer, keys_of(first), other, keys_of(second))
    assert list(named_state(other, keys_of(second))) == ["used"]


def test_saved_options_win_and_that_is_told():
    first, second = parameters("a", "b"), parameters("a", "b")
    optimizer = AdamW([{"params": [first["a"]], "weight_decay": 0.1}, {"params": [first["b"]], "lr": 0.01}], lr=0.1)
    other = AdamW([{"params": [second["a"]], "weight_decay": 0.3}, {"params": [second["b"]], "lr": 0.01}], lr=0.1)
    for of_one in (optimizer, other):
        torch.optim.lr_scheduler.LambdaLR(of_one, lambda step: 0.5)
    other.param_groups[1]["initial_lr"] = 0.02
    assert move(optimizer, keys_of(first), other, keys_of(second)) == [
        "weight_decay of group 0 of the optimizer: 0.1 of the checkpoint wins over 0.3 of the job",
        "lr of group 1 of the optimizer: 0.01 of the checkpoint wins over 0.02 of the job",
    ]
    assert [(group["weight_decay"], group["lr"]) for group in other.param_groups] == [(0.1, 0.05), (0.01, 0.005)]


def test_parameters_with_different_options_cannot_be_one_group():
    first, second = parameters("a", "b"), parameters("a", "b")
    optimizer = AdamW([{"params": [first["a"]], "weight_decay": 0.1}, {"params": [first["b"]], "weight_decay": 0.0}])
    saved = SavedOptions.of_optimizers([describe_optimizer(optimizer, keys_of(first))])
    (problem,) = state_problems(AdamW(second.values()), keys_of(second), saved)
    assert problem.startswith(
        "group 0 of the optimizer holds a and b, which have a weight_decay of 0.1 and of 0.0 there"
    )


def test_another_optimizer_is_named():
    first, second = parameters("a"), parameters("a")
    saved = SavedOptions.of_optimizers([describe_optimizer(AdamW(first.values()), keys_of(first))])
    problems = state_problems(SGD(second.values()), keys_of(second), saved)
    assert problems == ["the optimizer of a is AdamW there, and SGD in the job"]


def test_a_generator_comes_back():
    def build(named: dict[str, nn.Parameter]) -> StochasticAdamW:
        return StochasticAdamW(named.values(), lr=0.1, generator=torch.Generator().manual_seed(1))

    first, second = parameters("a", dtype=torch.bfloat16), parameters("a", dtype=torch.bfloat16)
    optimizer, other = build(first), build(second)
    step(first, optimizer)
    with torch.no_grad():
        second["a"].copy_(first["a"])
    move(optimizer, keys_of(first), other, keys_of(second))
    for _ in range(3):
        step(first, optimizer)
        step(second, other)
    assert torch.equal(first["a"], second["a"])
    assert other.state[second["a"]]["exp_avg"].dtype == torch.float32


def test_a_group_that_is_new_is_where_the_schedule_is():
    first, second = parameters("a"), parameters("a", "b")
    optimizer = SGD(first.values(), lr=0.4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    optimizer.step()
    schedule.step()
    other = SGD([{"params": [second["a"]]}, {"params": [second["b"]], "lr": 0.2}], lr=0.4)
    torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0 / (1 + step))
    move(optimizer, keys_of(first), other, keys_of(second))
    assert [group["lr"] for group in other.param_groups] == [0.2, 0.1]


class WideMoments(Optimizer):
    """Keeps float32 beside parameters of another dtype."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["moment"] = torch.full(parameter.shape, 1 / 3, dtype=torch.float32)


def test_state_keeps_its_dtype():
    first = parameters("a", dtype=torch.bfloat16)
    optimizer, second = WideMoments(first.values()), parameters("a", dtype=torch.bfloat16)
    optimizer.step()
    other = WideMoments(second.values())
    move(optimizer, keys_of(first), other, keys_of(second))
    assert torch.equal(other.state[second["a"]]["moment"], torch.full((3, 2), 1 / 3))


def test_room_is_laid_out_like_the_parameter():
    named = parameters("a", dtype=torch.bfloat16)
    optimizer = AdamW(named.values())
    saved = SavedOptions({"a": ["step", "exp_avg", "odd"]}, {"a": {}}, {"a": "AdamW"})
    entries = {
        "step": TensorStorageMetadata(_properties(torch.float32), torch.Size(()), []),
        "exp_avg": TensorStorageMetadata(_properties(torch.float32), torch.Size((3, 2)), []),
    }
    room = room_for_state(optimizer, keys_of(named), saved, lambda key, name: entries.get(name))
    assert room["a"]["exp_avg"].shape == (3, 2)
    assert room["a"]["exp_avg"].dtype == torch.float32
    assert room["a"]["step"].shape == ()
    assert room["a"]["odd"].value is None


def _properties(dtype: torch.dtype) -> Any:
    return torch.distributed.checkpoint.metadata.TensorProperties(dtype=dtype)


def test_a_parameter_of_nobody_is_refused():
    named = parameters("a", "b")
    with pytest.raises(
        ValueError, match=r"group 0 of AdamW has a parameter of shape \(3, 2\) that is not in the model"
    ):
        describe_optimizer(AdamW(named.values()), {named["a"]: "a"})


def test_values_are_compared_by_content():
    assert equal_values({"a": [1, (2.0, None)]}, {"a": [1, (2.0, None)]})
    assert equal_values(torch.ones(2), torch.ones(2))
    assert not equal_values(torch.ones(2), torch.ones(1))
    assert not equal_values(torch.ones(()), 1.0)
    assert not equal_values({"a": 1}, {"b": 1})
