"""Forward, callback and backward of each microbatch in turn."""

import weakref

import pytest
import torch
from torch import nn

from d9d.pipelining.executor import OfflinePipelineExecutor


class Scale(nn.Module):
    """Multiplies the input by a weight and adds what is shared; weighs the graphs that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        self.num_alive_at_forward: list[int] = []

    def forward(self, inputs: torch.Tensor, shared: float) -> torch.Tensor:
        self.num_alive_at_forward.append(sum(output() is not None for output in self.outputs))
        output = self.weight * inputs + shared
        self.outputs.append(weakref.ref(output))
        return output


class Journal:
    """Writes down the order of forward and backward passes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def loss(self, output: torch.Tensor, index: int) -> torch.Tensor:
        self.lines.append(f"loss {index}")
        return output

    def before_backward(self, microbatch_index: int, num_microbatches: int) -> None:
        self.lines.append(f"backward {microbatch_index}/{num_microbatches}")


INPUTS = (torch.tensor(1.0), torch.tensor(3.0), torch.tensor(5.0))
SHARED = (0.5, 0.5, 0.5)


def test_gradients_add_up_over_the_pack():
    model = Scale()
    OfflinePipelineExecutor(model, do_backward=True).step(INPUTS, SHARED, lambda output, _: output)
    # d(w * x + s) / dw = x, summed: 1 + 3 + 5.
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 9.0


def test_a_graph_is_freed_before_the_next_forward():
    model = Scale()
    OfflinePipelineExecutor(model, do_backward=True).step(INPUTS, SHARED, lambda output, _: output)
    assert model.num_alive_at_forward == [0, 0, 0]


def test_the_observer_hears_of_each_backward_before_it_runs():
    journal = Journal()
    executor = OfflinePipelineExecutor(Scale(), do_backward=True)
    executor.set_backward_observer(journal)
    executor.step(INPUTS, SHARED, journal.loss)
    assert journal.lines == ["loss 0", "backward 0/3", "loss 1", "backward 1/3", "loss 2", "backward 2/3"]


def test_without_backward_the_callback_returns_nothing():
    model = Scale()
    seen: list[tuple[int, float]] = []
    executor = OfflinePipelineExecutor(model, do_backward=False)
    executor.step(INPUTS, SHARED, lambda output, index: seen.append((index, output.item())))
    assert seen == [(0, 2.5), (1, 6.5), (2, 10.5)]
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("inputs", "shared", "message"),
    [((), (), "at least one microbatch"), (INPUTS, SHARED[:2], "3 microbatch inputs came with 2 shared")],
)
def test_a_broken_pack_is_refused(inputs, shared, message):
    executor = OfflinePipelineExecutor(Scale(), do_backward=True)
    with pytest.raises(ValueError, match=message):
        executor.step(inputs, shared, lambda output, _: output)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda output: output.expand(2), ValueError, r"microbatch 0 has shape \(2,\)"),
        (lambda output: output.detach(), ValueError, "no parameter that requires a gradient"),
        (lambda output: output.item(), TypeError, "must be a tensor, got float"),
    ],
)
def test_a_loss_without_a_backward_pass_is_refused(loss, error, message):
    executor = OfflinePipelineExecutor(Scale(), do_backward=True)
    with pytest.raises(error, match=message):
        executor.step(INPUTS, SHARED, lambda output, _: loss(output))
