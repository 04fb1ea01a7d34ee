"""The parity helpers: what they find, and that both sides of a comparison see the same numbers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from tests.harness.parity import (
    FP64_EXACT,
    assert_close_tree,
    full,
    named_full_gradients,
    named_full_parameters,
    reference_step,
)


def test_equal_trees_pass() -> None:
    tree = {"a": [torch.ones(2), 3], "b": {"c": "text"}}
    assert_close_tree(tree, {"a": [torch.ones(2), 3], "b": {"c": "text"}}, atol=0, rtol=0)


def test_all_differences_are_reported_at_once() -> None:
    actual = {"value": torch.zeros(2), "dtype": torch.zeros(1), "text": "a", "more": 1, "fine": 1.0}
    expected = {"value": torch.ones(2), "dtype": torch.zeros(1).double(), "text": "b", "less": 1, "fine": 1.0}
    with pytest.raises(AssertionError) as error:
        assert_close_tree(actual, expected, atol=0.5, rtol=0)
    for part in ("5 of 5", "['value']", "['dtype']", "['text']", "['more']: not expected", "['less']: missing"):
        assert part in str(error.value)
    assert "fine" not in str(error.value)


@pytest.mark.parametrize(("difference", "is_close"), [(0.9e-3, True), (1.1e-3, False)])
def test_tolerance_is_absolute_plus_relative(difference: float, is_close: bool) -> None:
    # |actual - expected| <= atol + rtol * |expected| = 5e-4 + 5e-4 * 1
    actual, expected = torch.tensor(1.0 + difference), torch.tensor(1.0)
    if is_close:
        assert_close_tree(actual, expected, atol=5e-4, rtol=5e-4)
    else:
        with pytest.raises(AssertionError, match="root"):
            assert_close_tree(actual, expected, atol=5e-4, rtol=5e-4)


def test_nan_is_close_to_nothing() -> None:
    with pytest.raises(AssertionError):
        assert_close_tree(torch.tensor(torch.nan), torch.tensor(torch.nan), atol=1, rtol=1)


def test_reference_step_sums_gradients_and_steps_once() -> None:
    # loss = w * x, so the gradient of each batch is its x: 2 + 3 = 5, and w = 1 - 0.1 * 5.
    def build_model() -> nn.Module:
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.ones_(model.weight)
        return model

    batches = [torch.tensor([2.0]).double(), torch.tensor([3.0]).double()]
    losses, grads, params = reference_step(
        build_model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), batches, lambda model, x: model(x).sum()
    )
    assert [loss.item() for loss in losses] == [2.0, 3.0]
    assert_close_tree(grads, {"weight": torch.tensor([[5.0]]).double()}, atol=0, rtol=0)
    assert_close_tree(params, {"weight": torch.tensor([[0.5]]).double()}, atol=FP64_EXACT, rtol=0)


@pytest.mark.world_size(2)
def test_full_assembles_a_dtensor_and_leaves_a_tensor() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0).reshape(3, 2)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(full(sharded), whole)
    assert full(whole) is whole
    assert_close_tree({"sharded": sharded}, {"sharded": whole}, atol=0, rtol=0)


@pytest.mark.world_size(2)
def test_sharded_step_equals_the_reference_step() -> None:
    def build_model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def build_optimizer(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum()

    batches = list(torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    reference = reference_step(build_model, build_optimizer, batches, loss_fn)

    model = fully_shard(build_model(), mesh=init_device_mesh("cpu", (2,)))
    model.set_gradient_divide_factor(1.0)  # sum over ranks, as the reference sums over batches
    optimizer = build_optimizer(model.parameters())
    loss = loss_fn(model, batches[dist.get_rank()])
    loss.backward()
    assert_close_tree(loss.detach(), reference.losses[dist.get_rank()], atol=FP64_EXACT, rtol=FP64_EXACT)
    assert_close_tree(named_full_gradients(model), reference.grads, atol=FP64_EXACT, rtol=FP64_EXACT)
    optimizer.step()
    assert_close_tree(named_full_parameters(model), reference.params, atol=FP64_EXACT, rtol=FP64_EXACT)
