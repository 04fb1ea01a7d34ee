"""Joining and taking apart, against torch's own operations, and back through the inverse."""

import pytest
import torch

from d9d.model_state.mapper import ModelStateMapper
from d9d.model_state.mapper.leaf import (
    ModelStateMapperChunkTensors,
    ModelStateMapperConcatenateTensors,
    ModelStateMapperStackTensors,
    ModelStateMapperUnstackTensors,
)
from tests.d9d.model_state.mapper.support import (
    Case,
    Tensors,
    assert_distributed_gives_the_same,
    assert_maps,
    assert_maps_and_comes_back,
    assert_same,
    can_be_distributed,
    numbers,
    rows,
    traced,
)

A, B, C = numbers(4, 3), numbers(2, 3, first=20), numbers(2, 3, first=30)
VECTOR, SCALAR, EMPTY = numbers(6), torch.tensor(7), torch.zeros(0, 3)

CASES: dict[str, Case] = {
    "cat": (
        ModelStateMapperConcatenateTensors(["a", "b", "c"], "abc", 0, sizes=[4, 2, 2]),
        {"c": C, "b": B, "a": A},
        {"abc": torch.cat([A, B, C])},
    ),
    "cat along a dimension from the end": (
        ModelStateMapperConcatenateTensors(["a", "b"], "ab", -2, sizes=[4, 2]),
        {"a": A, "b": B},
        {"ab": torch.cat([A, B])},
    ),
    "cat of nothing": (
        ModelStateMapperConcatenateTensors(["a", "b"], "ab", 0, sizes=[4, 0]),
        {"a": A, "b": EMPTY.long()},
        {"ab": A},
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
}


@pytest.mark.parametrize("case", CASES)
def test_data_pieces_and_the_way_back_agree(case: str):
    assert_maps_and_comes_back(CASES[case])


def test_fused_qkv_of_grouped_queries_comes_back_with_sizes():
    # 4 heads, 2 key-value heads, head_dim 3; rows 100 + i, 200 + i, 300 + i
    parts = {"q": rows(*range(100, 112)), "k": rows(*range(200, 206)), "v": rows(*range(300, 306))}
    fuse = ModelStateMapperConcatenateTensors(["q", "k", "v"], "qkv", 0, sizes=[12, 6, 6])
    fused = fuse.apply(parts)
    assert fused["qkv"][:, 0].tolist() == [*range(100, 112), *range(200, 206), *range(300, 306)]
    assert_same(fuse.inverse().apply(fused), parts)


def test_whether_there_is_an_inverse_does_not_depend_on_what_was_joined():
    # Equal parts would be other weights, and nobody would notice. And ranks would differ if one of them has joined.
    joined = ModelStateMapperConcatenateTensors(["q", "k"], "qk", 0)
    message = r"'qk' does not know where its inverse must cut: give it `sizes`, the size of each of 'k', 'q' along dimension 0"
    with pytest.raises(NotImplementedError, match=message):
        joined.inverse()
    assert_maps(joined, {"q": A, "k": B}, {"qk": torch.cat([A, B])})
    with pytest.raises(NotImplementedError, match=message):
        joined.inverse()


def test_equal_parts_come_back():
    mapper = ModelStateMapperChunkTensors("a", ["x", "y"], -2)
    assert_maps(mapper, {"a": A}, {"x": A[:2], "y": A[2:]})
    inverse = mapper.inverse()
    assert_maps(inverse, {"x": A[:2], "y": A[2:]}, {"a": A})
    with pytest.raises(NotImplementedError, match="give it `sizes`"):
        inverse.inverse()


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
@pytest.mark.parametrize("case", [case for case in CASES if can_be_distributed(CASES[case])])
def test_distributed_tensors_give_the_same(case: str):
    assert_distributed_gives_the_same(CASES[case])


def test_a_text_is_no_list_of_names():
    with pytest.raises(TypeError, match="source_names must be a list of names, not the text 'qkv'"):
        ModelStateMapperConcatenateTensors("qkv", "b", 0)
