"""States of microbatches, and the graphs that they must not keep."""

import dataclasses
import weakref

import pytest
import torch

from d9d.loop.component.pipeline_state import PipelineStateHandler


@dataclasses.dataclass
class State:
    target: torch.Tensor
    logits: torch.Tensor | None = None


def test_a_state_is_lent_and_forgotten():
    handler = PipelineStateHandler[State]()
    state = State(target=torch.tensor(1.0))
    handler.store(3, state)
    with handler.scope(3) as lent:
        assert lent is state
    with handler.scope(3) as lent:
        assert lent is state
    handler.reset()
    with pytest.raises(RuntimeError, match="microbatch 3 has no state"), handler.scope(3):
        pass


def test_the_end_of_a_scope_frees_the_graph():
    handler = PipelineStateHandler[State]()
    handler.store(0, State(target=torch.tensor(1.0)))
    weight = torch.ones(2, requires_grad=True)
    with handler.scope(0) as state:
        state.logits = weight * 2
        with_graph = weakref.ref(state.logits)
    del state
    with handler.scope(0) as state:
        assert state.logits is not None
        assert (state.logits.tolist(), state.logits.requires_grad) == ([2.0, 2.0], False)
    assert with_graph() is None


def test_an_exception_ends_the_scope_too():
    handler = PipelineStateHandler[dict]()
    handler.store(0, {"x": torch.ones(1, requires_grad=True)})
    with pytest.raises(KeyError), handler.scope(0):
        raise KeyError
    with handler.scope(0) as state:
        assert not state["x"].requires_grad


def test_a_state_that_a_failed_step_left_is_replaced():
    handler = PipelineStateHandler[str]()
    handler.store(0, "old")
    handler.store(0, "new")
    with handler.scope(0) as state:
        assert state == "new"
