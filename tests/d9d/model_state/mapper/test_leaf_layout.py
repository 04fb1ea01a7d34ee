"""Order of rows, padding, dtypes and ties, against hand counts and torch's own indexing."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperSequential
from d9d.model_state.mapper.leaf import (
    ModelStateMapperCast,
    ModelStateMapperChunkTensors,
    ModelStateMapperConcatenateTensors,
    ModelStateMapperDrop,
    ModelStateMapperInterleavedToStacked,
    ModelStateMapperPadRows,
    ModelStateMapperSlice,
    ModelStateMapperStackedToInterleaved,
    ModelStateMapperTie,
)
from d9d.model_state.mapper.pieces import Box, TensorPieces

Tensors = dict[str, torch.Tensor]


def whole(group: Tensors) -> dict[str, TensorPieces]:
    return {name: TensorPieces.whole(name, tensor.shape, tensor.dtype) for name, tensor in group.items()}


def traced(mapper: ModelStateMapper, group: Tensors) -> Tensors:
    pieces = mapper.trace(whole(group))
    assert pieces is not None
    filled = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in pieces.items()}
    for name, tensor in pieces.items():
        tensor.fill(filled[name], Box.whole(tensor.shape), lambda source, box: group[source][box.slices])
    return filled


def assert_maps(mapper: ModelStateMapper, group: Tensors, expected: Tensors) -> None:
    for actual in (mapper.apply(dict(group)), traced(mapper, group)):
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(actual[name], tensor)


def rows(*values: int) -> torch.Tensor:
    return torch.tensor(values)[:, None].expand(len(values), 2).contiguous()


NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 3
# By hand: each of the 2 key-value heads has 2 query heads of 3 rows, its key of 3 rows and its value of 3 rows.
INTERLEAVED_QKV = rows(
    *range(100, 106), *range(200, 203), *range(300, 303), *range(106, 112), *range(203, 206), *range(303, 306)
)
STACKED_QKV = rows(*range(100, 112), *range(200, 206), *range(300, 306))
GROUP_SIZES = [NUM_HEADS // NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, HEAD_DIM]


@pytest.mark.parametrize("dim", [0, -2])
def test_interleaved_qkv_of_grouped_queries(dim: int):
    mapper = ModelStateMapperInterleavedToStacked("h.qkv", "qkv", dim, GROUP_SIZES, NUM_KV_HEADS)
    assert mapper.state_dependency_groups() == {StateGroup(frozenset(["h.qkv"]), frozenset(["qkv"]))}
    assert_maps(mapper, {"h.qkv": INTERLEAVED_QKV}, {"qkv": STACKED_QKV})
    assert_maps(mapper.inverse(), {"qkv": STACKED_QKV}, {"h.qkv": INTERLEAVED_QKV})
    assert_maps(mapper.inverse().inverse(), {"h.qkv": INTERLEAVED_QKV}, {"qkv": STACKED_QKV})
    bias = {"h.qkv": INTERLEAVED_QKV[:, 0].contiguous()}
    if dim == 0:
        assert_maps(mapper, bias, {"qkv": STACKED_QKV[:, 0]})


def test_queries_keys_and_values_through_every_fused_layout_and_back():
    parts = {
        "q": rows(*(100 + i for i in range(12))),
        "k": rows(*(200 + i for i in range(6))),
        "v": rows(*(300 + i for i in range(6))),
    }
    fuse = ModelStateMapperSequential(
        [
            ModelStateMapperConcatenateTensors(["q", "k", "v"], "stacked", 0, sizes=[12, 6, 6]),
            ModelStateMapperStackedToInterleaved("stacked", "qkv", 0, GROUP_SIZES, NUM_KV_HEADS),
        ]
    )
    assert_maps(fuse, parts, {"qkv": INTERLEAVED_QKV})
    assert_maps(fuse.inverse(), {"qkv": INTERLEAVED_QKV}, parts)
    # The same with a mapper that cuts a fused tensor of another tool.
    cut = ModelStateMapperSequential(
        [
            ModelStateMapperInterleavedToStacked("qkv", "qkv", 0, GROUP_SIZES, NUM_KV_HEADS),
            ModelStateMapperChunkTensors("qkv", ["q", "k", "v"], 0, sizes=[12, 6, 6]),
        ]
    )
    assert_maps(cut, {"qkv": INTERLEAVED_QKV}, parts)
    assert_maps(cut.inverse(), parts, {"qkv": INTERLEAVED_QKV})


@pytest.mark.parametrize("block", [1, 2])
def test_gate_and_up_that_alternate(block: int):
    hidden = 6
    fused = torch.arange(2 * hidden * 3).view(2 * hidden, 3)
    # torch's own: gate is the even blocks, up the odd ones
    gate, up = fused.view(-1, 2, block, 3)[:, 0].reshape(-1, 3), fused.view(-1, 2, block, 3)[:, 1].reshape(-1, 3)
    mapper = ModelStateMapperInterleavedToStacked("w", "w", 0, [block, block], hidden // block)
    assert_maps(mapper, {"w": fused}, {"w": torch.cat([gate, up])})
    across = ModelStateMapperInterleavedToStacked("w", "w", 1, [block, block], hidden // block)
    assert_maps(across, {"w": fused.t().contiguous()}, {"w": torch.cat([gate, up]).t()})


def test_thousands_of_blocks_are_not_read_one_by_one():
    fused = torch.arange(6000)[:, None]
    mapper = ModelStateMapperInterleavedToStacked("w", "w", 0, [1, 1], 3000)
    assert mapper.trace(whole({"w": fused})) is None
    assert mapper.inverse().trace(whole({"w": fused})) is None
    stacked = mapper.apply({"w": fused})
    assert torch.equal(stacked["w"], torch.cat([fused[0::2], fused[1::2]]))
    assert torch.equal(mapper.inverse().apply(stacked)["w"], fused)


def test_wrong_interleavings_are_refused():
    mapper = ModelStateMapperInterleavedToStacked("h.qkv", "qkv", 0, [2, 1, 1], 3)
    for run in (mapper.apply, lambda group: traced(mapper, group)):
        with pytest.raises(ValueError, match=r"'h.qkv' has the size 24.*3 groups of 2 \+ 1 \+ 1 have 12"):
            run({"h.qkv": INTERLEAVED_QKV})
        with pytest.raises(IndexError, match=r"'h.qkv' of shape \(\) has no dimension 0"):
            run({"h.qkv": torch.tensor(1)})
    for sizes, num_groups in [([], 1), ([0, 1], 1), ([1], 0)]:
        with pytest.raises(ValueError, match="must be positive"):
            ModelStateMapperInterleavedToStacked("a", "a", 0, sizes, num_groups)


def test_slices_and_their_limits():
    tensor = torch.arange(12).view(3, 4)
    assert_maps(ModelStateMapperSlice("a", "b", -1, 1, 2), {"a": tensor}, {"b": tensor[:, 1:3]})
    assert_maps(ModelStateMapperSlice("a", "a", 0, 3, 0), {"a": tensor}, {"a": tensor[3:]})
    with pytest.raises(ValueError, match=r"'a'.*there are 1"):
        ModelStateMapperSlice("a", "b", 0, 2, 2).apply({"a": tensor})
    with pytest.raises(NotImplementedError, match="Slice has no inverse"):
        ModelStateMapperSlice("a", "b", 0, 2, 2).inverse()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_vocabulary_is_padded_and_its_padding_dropped(dtype: torch.dtype):
    embedding = torch.arange(1, 27, dtype=torch.float32).view(13, 2).to(dtype)
    padded = torch.cat([embedding.float(), torch.zeros(1, 2)]).to(dtype)
    for source_rows in (None, 13):
        mapper = ModelStateMapperPadRows("e", 14, source_rows=source_rows)
        for actual in (mapper.apply({"e": embedding})["e"], traced(mapper, {"e": embedding})["e"]):
            assert actual.dtype == dtype
            assert torch.equal(actual.float(), padded.float())
        back = mapper.inverse().apply({"e": padded})["e"]
        assert torch.equal(back.float(), embedding.float())
    mapper = ModelStateMapperPadRows("e", 13)
    assert torch.equal(mapper.apply({"e": embedding})["e"].float(), embedding.float())


def test_padding_that_cannot_be():
    used_twice = ModelStateMapperPadRows("e", 14)
    for num_rows in (12, 13):
        used_twice.apply({"e": torch.zeros(num_rows)})
    with pytest.raises(NotImplementedError, match="`source_rows`"):
        used_twice.inverse()
    with pytest.raises(NotImplementedError, match=r"'e' to 14.*`source_rows`"):
        ModelStateMapperPadRows("e", 14).inverse()
    with pytest.raises(ValueError, match=r"'e' to 3.*longer already"):
        ModelStateMapperPadRows("e", 3).apply({"e": torch.zeros(4)})
    with pytest.raises(ValueError, match="'e' has 12 rows, not 13 as declared"):
        ModelStateMapperPadRows("e", 14, source_rows=13).apply({"e": torch.zeros(12)})
    with pytest.raises(IndexError, match="no dimensions"):
        ModelStateMapperPadRows("e", 3).apply({"e": torch.tensor(1)})


def test_casts():
    values = torch.tensor([1 + 2**-9, -3.0])
    mapper = ModelStateMapperCast("a", torch.bfloat16, source_dtype=torch.float32)
    assert_maps(mapper, {"a": values}, {"a": values.bfloat16()})
    assert_maps(mapper.inverse(), {"a": values.bfloat16()}, {"a": values.bfloat16().float()})
    # Rounding in the middle is not lost when pieces are copied at once.
    there_and_back = ModelStateMapperSequential([mapper, mapper.inverse()])
    assert_maps(there_and_back, {"a": values}, {"a": values.bfloat16().float()})
    with pytest.raises(NotImplementedError, match=r"'a'.*`source_dtype`"):
        ModelStateMapperCast("a", torch.bfloat16).inverse()


def test_one_source_for_tied_targets():
    weight = torch.arange(6).view(3, 2)
    mapper = ModelStateMapperTie(["embed"], ["embed", "lm_head"])
    assert mapper.optional_inputs() == frozenset()
    assert_maps(mapper, {"embed": weight}, {"embed": weight, "lm_head": weight})
    inverse = mapper.inverse()
    assert inverse.optional_inputs() == {"lm_head"}
    assert torch.equal(inverse.apply({"embed": weight, "lm_head": weight.clone()})["embed"], weight)
    assert_maps(inverse, {"embed": weight}, {"embed": weight})


def test_tied_sources_must_be_equal_where_they_are_there():
    weight = torch.arange(6.0).view(3, 2)
    mapper = ModelStateMapperTie(["embed", "lm_head"], ["embed", "lm_head"])
    assert mapper.optional_inputs() == {"lm_head"}
    assert_maps(mapper, {"embed": weight}, {"embed": weight, "lm_head": weight})
    both = {"embed": weight, "lm_head": weight.clone()}
    assert mapper.trace(whole(both)) is None, "whether they are equal is seen by reading both"
    assert torch.equal(mapper.apply(both)["lm_head"], weight)
    for other, message in [
        (weight + 1, "'embed' and 'lm_head' are tied, but their values differ"),
        (weight.double(), r"one is \(3, 2\) of torch.float32, the other \(3, 2\) of torch.float64"),
        (weight[:2], r"the other \(2, 2\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            mapper.apply({"embed": weight, "lm_head": other})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool])
def test_ties_compare_every_dtype(dtype: torch.dtype):
    values, other = torch.tensor([0.0, 1.0]).to(dtype), torch.tensor([1.0, 1.0]).to(dtype)
    mapper = ModelStateMapperTie(["a", "b"], ["c"])
    assert mapper.apply({"a": values, "b": values.clone()})["c"] is values
    with pytest.raises(ValueError, match="differ"):
        mapper.apply({"a": values, "b": other})


def test_dropped_tensors_may_be_missing_and_do_not_come_back():
    mapper = ModelStateMapperDrop(["rotary.inv_freq", "position_ids"])
    assert mapper.state_dependency_groups() == {
        StateGroup(frozenset([name]), frozenset()) for name in ("rotary.inv_freq", "position_ids")
    }
    assert mapper.optional_inputs() == {"rotary.inv_freq", "position_ids"}
    assert_maps(mapper, {"position_ids": torch.arange(3)}, {})
    assert mapper.inverse().state_dependency_groups() == frozenset()


@pytest.mark.world_size(2)
def test_distributed_tensors_give_the_same():
    mesh = init_device_mesh("cpu", (2,))
    embedding = torch.arange(26.0).view(13, 2)
    fused = INTERLEAVED_QKV
    cases: list[tuple[ModelStateMapper, Tensors, Tensors]] = [
        (ModelStateMapperInterleavedToStacked("a", "a", 0, GROUP_SIZES, 2), {"a": fused}, {"a": STACKED_QKV}),
        (ModelStateMapperStackedToInterleaved("a", "a", 0, GROUP_SIZES, 2), {"a": STACKED_QKV}, {"a": fused}),
        (ModelStateMapperSlice("a", "b", 0, 3, 5), {"a": fused}, {"b": fused[3:8]}),
        (ModelStateMapperPadRows("a", 15), {"a": embedding}, {"a": torch.cat([embedding, torch.zeros(2, 2)])}),
        (ModelStateMapperCast("a", torch.float16), {"a": embedding}, {"a": embedding.half()}),
        (ModelStateMapperTie(["a", "b"], ["c"]), {"a": embedding, "b": embedding}, {"c": embedding}),
    ]
    for mapper, group, expected in cases:
        for placement in (Shard(0), Shard(1)):
            distributed = {name: distribute_tensor(tensor, mesh, [placement]) for name, tensor in group.items()}
            for name, output in mapper.apply(dict(distributed)).items():
                assert isinstance(output, DTensor)
                assert torch.equal(output.full_tensor(), expected[name])


@pytest.mark.world_size(2)
def test_a_tie_that_differs_on_one_rank_only_is_refused_on_both():
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(4.0)
    other = full.clone()
    other[3] += 1
    group = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in [("a", full), ("b", other)]}
    with pytest.raises(ValueError, match="'a' and 'b' are tied, but their values differ"):
        ModelStateMapperTie(["a", "b"], ["c"]).apply(group)
