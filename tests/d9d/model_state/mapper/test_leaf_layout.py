"""Rows in another order, repeated, padded or cut out, against hand counts and torch's own indexing."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from d9d.model_state.mapper import StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperSequential
from d9d.model_state.mapper.leaf import (
    ModelStateMapperChunkTensors,
    ModelStateMapperConcatenateTensors,
    ModelStateMapperInterleavedToStacked,
    ModelStateMapperPadRows,
    ModelStateMapperRepeatHeads,
    ModelStateMapperSlice,
    ModelStateMapperStackedToInterleaved,
    ModelStateMapperUnrepeatHeads,
)
from tests.d9d.model_state.mapper.support import Case, assert_maps, rows, traced, whole

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
    back = ModelStateMapperPadRows("e", 14, source_rows=13).inverse().apply({"e": padded})["e"]
    assert torch.equal(back.float(), embedding.float())
    mapper = ModelStateMapperPadRows("e", 13)
    assert torch.equal(mapper.apply({"e": embedding})["e"].float(), embedding.float())


def test_padding_that_cannot_be():
    undeclared = ModelStateMapperPadRows("e", 14)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"'e' to 14.*`source_rows`"):
            undeclared.inverse()
        # What it has padded makes no difference: other ranks may have padded nothing.
        assert_maps(undeclared, {"e": torch.ones(13)}, {"e": torch.tensor([1.0] * 13 + [0.0])})
    with pytest.raises(ValueError, match=r"'e' to 3.*longer already"):
        ModelStateMapperPadRows("e", 3).apply({"e": torch.zeros(4)})
    with pytest.raises(ValueError, match="'e' has 12 rows, not 13 as declared"):
        ModelStateMapperPadRows("e", 14, source_rows=13).apply({"e": torch.zeros(12)})
    with pytest.raises(IndexError, match="no dimensions"):
        ModelStateMapperPadRows("e", 3).apply({"e": torch.tensor(1)})


# 2 key-value heads of 3 rows for tensor parallelism of 4: by hand
KV_HEADS, KV_HEADS_TWICE = rows(*range(200, 206)), rows(200, 201, 202, 200, 201, 202, 203, 204, 205, 203, 204, 205)


@pytest.mark.parametrize("dim", [0, -2])
def test_heads_are_repeated_and_come_back(dim: int):
    mapper = ModelStateMapperRepeatHeads("h.k", "k", dim, num_heads=2, repeats=2)
    assert mapper.state_dependency_groups() == {StateGroup(frozenset(["h.k"]), frozenset(["k"]))}
    assert_maps(mapper, {"h.k": KV_HEADS}, {"k": KV_HEADS_TWICE})
    inverse = mapper.inverse()
    assert inverse.state_dependency_groups() == {StateGroup(frozenset(["k"]), frozenset(["h.k"]))}
    assert torch.equal(inverse.apply({"k": KV_HEADS_TWICE})["h.k"], KV_HEADS)
    assert inverse.trace(whole({"k": KV_HEADS_TWICE})) is None, "whether copies are equal is seen by reading them"
    assert_maps(inverse.inverse(), {"h.k": KV_HEADS}, {"k": KV_HEADS_TWICE})


@pytest.mark.parametrize(("num_heads", "repeats"), [(1, 4), (2, 3), (3, 1), (6, 2)])
def test_heads_are_repeated_as_torch_repeats(num_heads: int, repeats: int):
    weight = torch.arange(24.0).view(2, 12)
    weight[0, 0] = float("nan")
    heads = weight.view(2, num_heads, -1).repeat_interleave(repeats, 1).flatten(1)
    mapper = ModelStateMapperRepeatHeads("w", "w", 1, num_heads, repeats)
    torch.testing.assert_close(mapper.apply({"w": weight})["w"], heads, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(traced(mapper, {"w": weight})["w"], heads, rtol=0, atol=0, equal_nan=True)
    back = mapper.inverse().apply({"w": heads})["w"]
    torch.testing.assert_close(back, weight, rtol=0, atol=0, equal_nan=True)
    if repeats == 1:
        assert_maps(mapper.inverse(), {"w": torch.ones(2, 12)}, {"w": torch.ones(2, 12)})


def test_copies_of_a_head_that_differ_are_refused():
    changed = KV_HEADS_TWICE.clone()
    changed[10, 1] += 1  # the second copy of head 1
    mapper = ModelStateMapperUnrepeatHeads("k", "h.k", 0, num_heads=2, repeats=2)
    with pytest.raises(ValueError, match=r"'k' has copy 1 of head 1 that differs from copy 0.*export all 4 of them"):
        mapper.apply({"k": changed})


def test_heads_that_cannot_be():
    repeat, unrepeat = (
        kind("k", "k", 0, num_heads=4, repeats=2)
        for kind in (ModelStateMapperRepeatHeads, ModelStateMapperUnrepeatHeads)
    )
    with pytest.raises(ValueError, match=r"'k' has the size 6 along dimension 0.*multiple of 4 heads"):
        repeat.apply({"k": KV_HEADS})
    with pytest.raises(ValueError, match=r"'k' has the size 12 along dimension 0.*multiple of 8 heads"):
        unrepeat.apply({"k": KV_HEADS_TWICE})
    with pytest.raises(ValueError, match="multiple of 8 heads"):
        unrepeat.trace(whole({"k": KV_HEADS_TWICE}))
    with pytest.raises(IndexError, match=r"'k' of shape \(\) has no dimension 0"):
        repeat.apply({"k": torch.tensor(1)})
    with pytest.raises(ValueError, match=r"'k': num_heads \(0\) and repeats \(2\) must be positive"):
        ModelStateMapperRepeatHeads("k", "k", 0, 0, 2)


def test_thousands_of_copies_are_not_read_one_by_one():
    mapper = ModelStateMapperRepeatHeads("k", "k", 0, num_heads=3000, repeats=2)
    heads = torch.arange(3000)
    assert mapper.trace(whole({"k": heads})) is None
    assert torch.equal(mapper.apply({"k": heads})["k"], heads.repeat_interleave(2))


@pytest.mark.world_size(2)
def test_distributed_tensors_give_the_same():
    mesh = init_device_mesh("cpu", (2,))
    embedding = torch.arange(26.0).view(13, 2)
    fused = INTERLEAVED_QKV
    cases: list[Case] = [
        (ModelStateMapperInterleavedToStacked("a", "a", 0, GROUP_SIZES, 2), {"a": fused}, {"a": STACKED_QKV}),
        (ModelStateMapperStackedToInterleaved("a", "a", 0, GROUP_SIZES, 2), {"a": STACKED_QKV}, {"a": fused}),
        (ModelStateMapperSlice("a", "b", 0, 3, 5), {"a": fused}, {"b": fused[3:8]}),
        (ModelStateMapperPadRows("a", 15), {"a": embedding}, {"a": torch.cat([embedding, torch.zeros(2, 2)])}),
        (ModelStateMapperRepeatHeads("a", "b", 0, 2, 2), {"a": KV_HEADS}, {"b": KV_HEADS_TWICE}),
        (ModelStateMapperUnrepeatHeads("b", "a", 0, 2, 2), {"b": KV_HEADS_TWICE}, {"a": KV_HEADS}),
    ]
    for mapper, group, expected in cases:
        for placement in (Shard(0), Shard(1)):
            distributed = {name: distribute_tensor(tensor, mesh, [placement]) for name, tensor in group.items()}
            for name, output in mapper.apply(dict(distributed)).items():
                assert isinstance(output, DTensor)
                assert torch.equal(output.full_tensor(), expected[name])


@pytest.mark.world_size(2)
def test_copies_that_differ_on_one_rank_only_are_refused_on_both():
    mesh = init_device_mesh("cpu", (2,))
    changed = KV_HEADS_TWICE.clone()
    changed[11, 1] += 1
    with pytest.raises(ValueError, match="'k' has copy 1 of head 1 that differs"):
        ModelStateMapperUnrepeatHeads("k", "k", 0, 2, 2).apply({"k": distribute_tensor(changed, mesh, [Shard(0)])})
