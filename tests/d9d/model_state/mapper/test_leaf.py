"""Each mapper against torch's own operation, as data and as pieces, and back through its inverse."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.leaf import (
    ModelStateMapperChunkTensors,
    ModelStateMapperConcatenateTensors,
    ModelStateMapperDistribute,
    ModelStateMapperGatherFullTensor,
    ModelStateMapperIdentity,
    ModelStateMapperRename,
    ModelStateMapperSelectChildModules,
    ModelStateMapperSqueeze,
    ModelStateMapperStackTensors,
    ModelStateMapperTranspose,
    ModelStateMapperUnsqueeze,
    ModelStateMapperUnstackTensors,
)
from d9d.model_state.mapper.pieces import Box, TensorPieces

Tensors = dict[str, torch.Tensor]


def traced(mapper: ModelStateMapper, group: Tensors) -> Tensors | None:
    """What pieces make of a group, filled in from its tensors."""
    pieces = mapper.trace({n: TensorPieces.whole(n, tensor.shape, tensor.dtype) for n, tensor in group.items()})
    if pieces is None:
        return None
    filled: Tensors = {}
    for name, tensor in pieces.items():
        filled[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        tensor.fill(filled[name], Box.whole(tensor.shape), lambda source, box: group[source][box.slices])
    return filled


def assert_same(actual: Tensors | None, expected: Tensors) -> None:
    assert actual is not None
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(actual[name], tensor)


def numbers(*shape: int, first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + torch.Size(shape).numel()).view(shape)


A, B, C = numbers(4, 3), numbers(2, 3, first=20), numbers(2, 3, first=30)
VECTOR, SCALAR, EMPTY = numbers(6), torch.tensor(7), torch.zeros(0, 3)

CASES: dict[str, tuple[ModelStateMapper, Tensors, Tensors]] = {
    "identity": (ModelStateMapperIdentity("a.b"), {"a.b": SCALAR}, {"a.b": SCALAR}),
    "rename": (ModelStateMapperRename("a.b", "c"), {"a.b": EMPTY}, {"c": EMPTY}),
    "select": (ModelStateMapperSelectChildModules(["w.x"], "m.n"), {"m.n.w.x": A}, {"w.x": A}),
    "cat": (
        ModelStateMapperConcatenateTensors(["a", "b", "c"], "abc", 0),
        {"c": C, "b": B, "a": A},
        {"abc": torch.cat([A, B, C])},
    ),
    "cat with sizes": (
        ModelStateMapperConcatenateTensors(["a", "b"], "ab", -2, sizes=[4, 2]),
        {"a": A, "b": B},
        {"ab": torch.cat([A, B])},
    ),
    "cat of nothing": (
        ModelStateMapperConcatenateTensors(["a", "b"], "ab", 0),
        {"a": A, "b": EMPTY.long()},
        {"ab": A},
    ),
    "chunk": (
        ModelStateMapperChunkTensors("a", ["x", "y"], -2),
        {"a": A},
        dict(zip("xy", A.chunk(2, -2), strict=True)),
    ),
    "chunk with sizes": (
        ModelStateMapperChunkTensors("a", ["x", "y", "z"], 0, sizes=[1, 0, 3]),
        {"a": A},
        {"x": A[:1], "y": A[:0], "z": A[1:]},
    ),
    "stack": (ModelStateMapperStackTensors(["b", "c"], "s", -1), {"c": C, "b": B}, {"s": torch.stack([B, C], -1)}),
    "stack scalars": (ModelStateMapperStackTensors(["s"], "v", 0), {"s": SCALAR}, {"v": SCALAR[None]}),
    "unstack": (ModelStateMapperUnstackTensors("b", ["x", "y"], 0), {"b": B}, {"x": B[0], "y": B[1]}),
    "unstack to scalars": (
        ModelStateMapperUnstackTensors("v", list("abcdef"), -1),
        {"v": VECTOR},
        {name: torch.tensor(index) for index, name in enumerate("abcdef")},
    ),
    "transpose": (ModelStateMapperTranspose("a", (0, -1)), {"a": A}, {"a": A.t()}),
    "squeeze": (ModelStateMapperSqueeze("a", -2), {"a": A.unsqueeze(1)}, {"a": A}),
    "unsqueeze": (ModelStateMapperUnsqueeze("a", -1), {"a": A}, {"a": A[..., None]}),
    "distribute on no mesh": (ModelStateMapperDistribute("a", None, None), {"a": A}, {"a": A}),
    "gather a plain tensor": (ModelStateMapperGatherFullTensor("a"), {"a": A}, {"a": A}),
}


@pytest.mark.parametrize("case", CASES)
def test_data_pieces_and_the_way_back_agree(case: str):
    mapper, group, expected = CASES[case]
    assert mapper.state_dependency_groups() == {StateGroup(frozenset(group), frozenset(expected))}
    assert mapper.optional_inputs() == frozenset()
    assert_same(mapper.apply(group), expected)
    assert_same(traced(mapper, group), expected)
    inverse = mapper.inverse()
    assert inverse.state_dependency_groups() == {StateGroup(frozenset(expected), frozenset(group))}
    assert_same(inverse.apply(expected), group)
    assert_same(traced(inverse, expected), group)
    assert_same(inverse.inverse().apply(group), expected)


def test_squeezing_all_dimensions_and_other_sizes_than_1():
    everything = ModelStateMapperSqueeze("a")
    assert_same(everything.apply({"a": A[None, :, None]}), {"a": A})
    assert_same(traced(everything, {"a": A[None, :, None]}), {"a": A})
    with pytest.raises(NotImplementedError, match=r"'a'.*`dim`"):
        everything.inverse()
    assert_same(ModelStateMapperSqueeze("a", 0).apply({"a": A}), {"a": A.squeeze(0)})


def test_child_modules_are_one_group_each():
    mapper = ModelStateMapperSelectChildModules(["w", "x.b"], "m")
    assert mapper.state_dependency_groups() == {
        StateGroup(frozenset(["m.w"]), frozenset(["w"])),
        StateGroup(frozenset(["m.x.b"]), frozenset(["x.b"])),
    }
    assert_same(mapper.apply({"m.x.b": B}), {"x.b": B})
    back = mapper.inverse()
    assert_same(back.apply({"x.b": B}), {"m.x.b": B})
    assert_same(back.apply({"w": A}), {"m.w": A})


def fused_rows(start: int, num_rows: int) -> torch.Tensor:
    """Rows filled with start, start + 1, ..."""
    return (start + torch.arange(num_rows))[:, None].expand(num_rows, 2).contiguous()


def test_fused_qkv_of_grouped_queries_comes_back_with_sizes():
    # 4 heads, 2 key-value heads, head_dim 3; rows 100 + i, 200 + i, 300 + i
    parts = {"q": fused_rows(100, 12), "k": fused_rows(200, 6), "v": fused_rows(300, 6)}
    fuse = ModelStateMapperConcatenateTensors(["q", "k", "v"], "qkv", 0, sizes=[12, 6, 6])
    fused = fuse.apply(parts)
    assert fused["qkv"][:, 0].tolist() == [*range(100, 112), *range(200, 206), *range(300, 306)]
    assert_same(fuse.inverse().apply(fused), parts)


@pytest.mark.parametrize("run", ["apply", "trace"])
def test_without_sizes_the_inverse_cuts_where_tensors_were_joined(run: str):
    parts = {"q": fused_rows(100, 12), "k": fused_rows(200, 6), "v": fused_rows(300, 6)}
    fuse = ModelStateMapperConcatenateTensors(["q", "k", "v"], "qkv", 0)
    fused = {"qkv": torch.cat(list(parts.values()))}
    # Equal parts would be other weights, and nobody would notice.
    with pytest.raises(NotImplementedError, match=r"'qkv' has joined no tensors yet: give it `sizes`"):
        fuse.inverse()
    if run == "apply":
        fuse.apply(parts)
    else:
        traced(fuse, parts)
    assert_same(fuse.inverse().apply(fused), parts)
    # The same mapper under another prefix, for a layer of other sizes: which of them is meant?
    fuse.apply({name: fused_rows(0, 8) for name in "qkv"})
    with pytest.raises(NotImplementedError, match="'qkv' has joined tensors of several sizes"):
        fuse.inverse()


@pytest.mark.parametrize(
    ("mapper", "group", "error", "message"),
    [
        (
            ModelStateMapperChunkTensors("a.w", ["x", "y", "z"], 0),
            {"a.w": A},
            ValueError,
            r"'a.w'.*size 4.*3 equal parts",
        ),
        (ModelStateMapperChunkTensors("a", ["x", "y"], 0, sizes=[1, 2]), {"a": A}, ValueError, r"size 4.*add up to 3"),
        (ModelStateMapperChunkTensors("a", ["x"], 2), {"a": A}, IndexError, "'a' has no dimension 2"),
        (ModelStateMapperChunkTensors("a", ["x"], 0), {"a": SCALAR}, IndexError, "no dimensions"),
        (
            ModelStateMapperConcatenateTensors(["a", "b"], "ab", 1),
            {"a": A, "b": B},
            ValueError,
            "'b'.*'a'.*sizes differ",
        ),
        (
            ModelStateMapperConcatenateTensors(["a", "b"], "ab", 0, sizes=[2, 4]),
            {"a": A, "b": B},
            ValueError,
            "'ab'.*'a', 'b', which have the sizes 4, 2, not 2, 4 as declared",
        ),
        (ModelStateMapperStackTensors(["a", "b"], "ab", 0), {"a": A, "b": B}, ValueError, "'b'.*'a'.*shapes differ"),
        (ModelStateMapperUnstackTensors("a", ["x"], 0), {"a": A}, ValueError, "'a' has 4 entries.*1 names"),
        (ModelStateMapperUnstackTensors("a", ["x"], 3), {"a": A}, IndexError, "'a' has no dimension 3"),
        (ModelStateMapperTranspose("a", (0, 2)), {"a": A}, IndexError, "'a' has no dimension 2"),
        (ModelStateMapperSqueeze("a", 2), {"a": A}, IndexError, "'a' has no dimension 2"),
        (ModelStateMapperUnsqueeze("a", 4), {"a": A}, IndexError, "'a' has no dimension 4"),
    ],
)
def test_wrong_shapes_are_named(mapper: ModelStateMapper, group: Tensors, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        mapper.apply(group)
    with pytest.raises(error, match=message):
        traced(mapper, group)


def test_wrong_names_are_refused():
    with pytest.raises(ValueError, match=r"source_names must be different.*'a' more than once"):
        ModelStateMapperConcatenateTensors(["a", "a"], "b", 0)
    with pytest.raises(ValueError, match=r"target_names must be different.*none"):
        ModelStateMapperUnstackTensors("a", [], 0)
    with pytest.raises(ValueError, match="one number for each of 'a', 'b', none negative; got 1"):
        ModelStateMapperConcatenateTensors(["a", "b"], "c", 0, sizes=[1])
    with pytest.raises(ValueError, match="none negative"):
        ModelStateMapperChunkTensors("a", ["b", "c"], 0, sizes=[3, -1])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("shape", [(1, 17), (6,), (5, 7)])
def test_distribute_and_gather_without_a_change(shape: tuple[int, ...]):
    mesh = init_device_mesh("cpu", (2,))
    full = numbers(*shape)
    for placement in (Shard(0), Shard(len(shape) - 1), Replicate()):
        mapper = ModelStateMapperDistribute("a", mesh, [placement])
        distributed = mapper.apply({"a": full})["a"]
        assert isinstance(distributed, DTensor)
        assert torch.equal(distributed.to_local(), distribute_tensor(full, mesh, [placement]).to_local())
        local = distributed.to_local()
        assert local.untyped_storage().nbytes() == local.nbytes, "a shard keeps the whole tensor in memory"
        assert_same(mapper.inverse().apply({"a": distributed}), {"a": full})
        assert_same(traced(mapper, {"a": full}), {"a": full})
    assert torch.equal(ModelStateMapperDistribute("a", mesh, None).apply({"a": full})["a"].to_local(), full)


@pytest.mark.world_size(2)
def test_distribute_does_not_communicate():
    # Each rank has its own values, so that torch's broadcast from rank 0 would show.
    mesh = init_device_mesh("cpu", (2,))
    mapper = ModelStateMapperDistribute("a", mesh, [Shard(0)])
    rank = dist.get_rank()
    assert mapper.apply({"a": torch.full((4,), rank)})["a"].to_local().tolist() == [rank, rank]


DISTRIBUTED = [case for case in CASES if all(tensor.ndim and tensor.numel() for tensor in CASES[case][1].values())]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", DISTRIBUTED)
def test_distributed_tensors_give_the_same(case: str):
    mapper, group, expected = CASES[case]
    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Replicate()):
        distributed = {name: distribute_tensor(tensor, mesh, [placement]) for name, tensor in group.items()}
        outputs = mapper.apply(dict(distributed))
        # All ranks gather in one order.
        full = {name: ModelStateMapperGatherFullTensor(name).apply({name: outputs[name]})[name] for name in expected}
        assert_same(full, expected)
