"""Directions inside, outside and after failing blocks."""

import pytest
import torch

from d9d.core.autograd import GLOBAL_GRAD_CONTEXT, GlobalGradContext, GradDirection


def wanted(context: GlobalGradContext) -> list[bool]:
    return [context.check_direction(direction) for direction in (GradDirection.inputs, GradDirection.weight, None)]


def test_directions_nest_and_are_restored():
    context = GlobalGradContext()
    assert wanted(context) == [True, True, True]
    with context.with_directions(GradDirection.inputs):
        assert wanted(context) == [True, False, True]
        with context.with_directions(GradDirection.weight):
            assert wanted(context) == [False, True, True]
        with context.with_directions():
            assert wanted(context) == [False, False, True]
        assert wanted(context) == [True, False, True]
    assert wanted(context) == [True, True, True]


def test_an_error_restores_the_directions():
    context = GlobalGradContext()
    with pytest.raises(ZeroDivisionError), context.with_directions(GradDirection.weight):
        raise ZeroDivisionError
    assert wanted(context) == [True, True, True]


def test_values_that_jobs_compare_with():
    assert GradDirection.inputs == "inputs"
    assert GradDirection.weight == "weights"


def test_backward_sees_the_directions_of_the_thread_that_called_it():
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(wanted(GLOBAL_GRAD_CONTEXT))
            return grad

    output = Probe.apply(torch.ones((), requires_grad=True))
    with GLOBAL_GRAD_CONTEXT.with_directions(GradDirection.weight):
        output.backward()
    assert seen == [[False, True, True]]
