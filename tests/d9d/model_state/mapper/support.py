"""Runs mappers as data and as pieces, and compares what comes out."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.leaf import ModelStateMapperGatherFullTensor
from d9d.model_state.mapper.pieces import Box, TensorPieces

Tensors = dict[str, torch.Tensor]
Case = tuple[ModelStateMapper, Tensors, Tensors]
"""A mapper, what it is given, and what torch makes of that."""


def whole(group: Tensors) -> dict[str, TensorPieces]:
    return {name: TensorPieces.whole(name, tensor.shape, tensor.dtype) for name, tensor in group.items()}


def traced(mapper: ModelStateMapper, group: Tensors) -> Tensors:
    """What pieces make of a group, filled in from its tensors."""
    pieces = mapper.trace(whole(group))
    assert pieces is not None
    filled: Tensors = {}
    for name, tensor in pieces.items():
        filled[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        tensor.fill(filled[name], Box.whole(tensor.shape), lambda source, box: group[source][box.slices])
    return filled


def assert_same(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(actual[name], tensor)


def assert_maps(mapper: ModelStateMapper, group: Tensors, expected: Tensors) -> None:
    """Apply and trace."""
    assert_same(mapper.apply(dict(group)), expected)
    assert_same(traced(mapper, group), expected)


def assert_maps_and_comes_back(case: Case) -> None:
    mapper, group, expected = case
    assert mapper.state_dependency_groups() == {StateGroup(frozenset(group), frozenset(expected))}
    assert mapper.optional_inputs() == frozenset()
    assert_maps(mapper, group, expected)
    inverse = mapper.inverse()
    assert inverse.state_dependency_groups() == {StateGroup(frozenset(expected), frozenset(group))}
    assert_maps(inverse, expected, group)


def can_be_distributed(case: Case) -> bool:
    return all(tensor.ndim and tensor.numel() for tensor in case[1].values())


def assert_distributed_gives_the_same(case: Case) -> None:
    mapper, group, expected = case
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Replicate()):
        outputs = mapper.apply({name: distribute_tensor(tensor, mesh, [placement]) for name, tensor in group.items()})
        # All ranks gather in one order.
        full = {name: ModelStateMapperGatherFullTensor(name).apply({name: outputs[name]})[name] for name in expected}
        assert_same(full, expected)


def numbers(*shape: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + torch.Size(shape).numel()).view(shape)


def rows(*values: int) -> torch.Tensor:
    """Rows filled with these."""
    return torch.tensor(values)[:, None].expand(len(values), 2).contiguous()
