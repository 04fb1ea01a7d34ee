"""Dtypes, ties and what is left out, against torch's own conversions."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from d9d.model_state.mapper import StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperSequential
from d9d.model_state.mapper.leaf import (
    ModelStateMapperCast,
    ModelStateMapperDrop,
    ModelStateMapperTie,
    ModelStateMapperUnrepeatHeads,
)
from tests.d9d.model_state.mapper.support import assert_maps, numbers, whole


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


NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64])
def test_ties_compare_bits(dtype: torch.dtype):
    mapper = ModelStateMapperTie(["a", "b"], ["c"])
    values = torch.tensor([[NAN, 0.0], [1.0, -2.0]]).to(dtype)
    assert mapper.apply({"a": values, "b": values.clone()})["c"] is values
    # strides and dimensions do not matter
    assert mapper.apply({"a": values.t(), "b": values.t().clone(memory_format=torch.contiguous_format)})
    assert mapper.apply({"a": values[0, 0], "b": values[0, 0].clone()})
    assert mapper.apply({"a": values[:0], "b": values[:0].clone()})
    with pytest.raises(ValueError, match="differ"):
        mapper.apply({"a": torch.tensor([0.0]).to(dtype), "b": torch.tensor([-0.0]).to(dtype)})


def test_dropped_tensors_may_be_missing_and_do_not_come_back():
    mapper = ModelStateMapperDrop(["rotary.inv_freq", "position_ids"])
    assert mapper.state_dependency_groups() == {
        StateGroup(frozenset([name]), frozenset()) for name in ("rotary.inv_freq", "position_ids")
    }
    assert mapper.optional_inputs() == {"rotary.inv_freq", "position_ids"}
    assert_maps(mapper, {"position_ids": torch.arange(3)}, {})
    assert mapper.inverse().state_dependency_groups() == frozenset()


def test_tensors_without_data_are_not_taken_for_equal():
    # Who plans a load runs mappers on them; that it cannot be foreseen is what makes it look at the data beforehand.
    group = {name: torch.empty(2, device="meta") for name in "ab"}
    with pytest.raises(RuntimeError, match="Meta"):
        ModelStateMapperTie(["a", "b"], ["c"]).apply(group)
    with pytest.raises(RuntimeError, match="Meta"):
        ModelStateMapperUnrepeatHeads("a", "c", 0, num_heads=1, repeats=2).apply({"a": group["a"]})


@pytest.mark.world_size(2)
def test_distributed_tensors_give_the_same():
    mesh = init_device_mesh("cpu", (2,))
    full = numbers(5, 2).float()
    full[0, 0] = NAN
    for placement in (Shard(0), Shard(1)):
        group = {name: distribute_tensor(full, mesh, [placement]) for name in "ab"}
        for mapper, expected in [
            (ModelStateMapperCast("a", torch.float16), full.half()),
            (ModelStateMapperTie(["a", "b"], ["a"]), full),
        ]:
            needed = {name for own in mapper.state_dependency_groups() for name in own.inputs}
            output = mapper.apply({name: group[name] for name in needed})["a"]
            assert isinstance(output, DTensor)
            torch.testing.assert_close(output.full_tensor(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.world_size(2)
def test_a_tie_that_differs_on_one_rank_only_is_refused_on_both():
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(4.0)
    other = full.clone()
    other[3] += 1
    group = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in [("a", full), ("b", other)]}
    with pytest.raises(ValueError, match="'a' and 'b' are tied, but their values differ"):
        ModelStateMapperTie(["a", "b"], ["c"]).apply(group)
