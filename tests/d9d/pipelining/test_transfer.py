"""Boundaries as flat specs: what is sent, what both sides know, and what does not fit."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from d9d.core.types import TensorSpec
from d9d.pipelining.transfer import BoundarySpec, flatten_output

ROW = TensorSpec((2, 3), torch.float64)
IDS = TensorSpec((2,), torch.int64)


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any = None


def send(output: object, spec: object) -> list[torch.Tensor]:
    """Take the leaves to send from what a stage has returned, against its spec."""
    return BoundarySpec(spec).sendable_leaves(*flatten_output(output))


def rows() -> torch.Tensor:
    return torch.ones(2, 3, dtype=torch.float64)


def test_a_single_tensor_is_a_boundary():
    tensor = rows()
    (sent,) = send(tensor, ROW)
    assert sent is tensor
    assert BoundarySpec(ROW).unflatten([tensor]) is tensor


@pytest.mark.parametrize(
    "build",
    [
        lambda a, b: (a, b),
        lambda a, b: [a, b],
        lambda a, b: {"x": a, "y": {"z": b}},
        lambda a, b: Pair(a, (b,)),
        lambda a, b: Pair({"deep": [a]}, Pair(None, b)),
    ],
    ids=["tuple", "list", "dicts", "dataclass", "nest"],
)
def test_a_tree_arrives_as_it_was_sent(build: Callable[[Any, Any], Any]):
    first, second = rows(), torch.tensor([4, 5])
    spec = build(ROW, IDS)
    sent = send(build(first, second), spec)
    assert [tensor.data_ptr() for tensor in sent] == [first.data_ptr(), second.data_ptr()]
    assert BoundarySpec(spec).unflatten(sent) == build(first, second)


def test_what_is_no_spec_is_known_to_both_sides_and_not_sent():
    spec = Pair(ROW, {"kind": "dense", "scale": 0.5, "absent": None})
    tensor = rows()
    assert len(send(Pair(tensor, {"kind": "dense", "scale": 0.5, "absent": None}), spec)) == 1
    received = BoundarySpec(spec).unflatten([tensor])
    assert received.left is tensor
    assert received.right == {"kind": "dense", "scale": 0.5, "absent": None}


@pytest.mark.parametrize(
    ("output", "produced"),
    [
        (Pair(torch.ones(2, 4, dtype=torch.float64), 1), "left: float64 (2, 4), right: 1"),
        (Pair(torch.ones(2, 3), 1), "left: float32 (2, 3), right: 1"),
        (Pair(None, 1), "right: 1"),
        (Pair(7, 1), "left: 7, right: 1"),
        (Pair(rows(), 2), "left: float64 (2, 3), right: 2"),
        (Pair(rows(), torch.tensor(1)), "left: float64 (2, 3), right: int64 ()"),
        (Pair(rows().to_sparse(), 1), "left: float64 (2, 3), torch.sparse_coo, right: 1"),
        ((rows(), 1), "[0]: float64 (2, 3), [1]: 1"),
        (rows(), "float64 (2, 3)"),
    ],
    ids=["shape", "dtype", "missing", "no tensor", "constant", "tensor for constant", "layout", "structure", "no tree"],
)
def test_an_output_that_does_not_fit_is_refused_with_both_specs(output: Any, produced: str):
    text = re.escape(f"  produced:  {produced}\n  specified: left: float64 (2, 3), right: 1\n")
    with pytest.raises(ValueError, match=text):
        send(output, Pair(ROW, 1))


@pytest.mark.world_size(1)
def test_a_distributed_tensor_is_refused():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = DTensor.from_local(rows(), mesh, [Replicate()])
    with pytest.raises(TypeError, match=r"DTensor of shape \(2, 3\).*return x\.to_local\(\)"):
        send(tensor, ROW)


def test_the_kind_of_a_boundary_has_no_shapes():
    kind = BoundarySpec(Pair(ROW, 1)).kind
    assert BoundarySpec(Pair(TensorSpec((9,), torch.float64), 1)).kind == kind
    assert BoundarySpec(Pair(TensorSpec((2, 3), torch.float32), 1)).kind != kind
    assert BoundarySpec((ROW, 1)).kind != kind
    assert len({kind, BoundarySpec(Pair(ROW, 1)).kind}) == 1


def test_constants_that_do_not_equal_themselves_are_compared_by_identity():
    nan = float("nan")
    assert BoundarySpec((ROW, nan)).sendable_leaves(*flatten_output((torch.zeros(ROW.shape, dtype=ROW.dtype), nan)))


def test_a_constant_that_cannot_be_compared_is_a_mismatch():
    output = (torch.zeros(ROW.shape, dtype=ROW.dtype), np.arange(2))
    with pytest.raises(ValueError, match="the stage produced something else"):
        BoundarySpec((ROW, 1)).sendable_leaves(*flatten_output(output))
