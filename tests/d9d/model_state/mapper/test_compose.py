"""Compositions: what they group, in which order they run, what they refuse, and their way back."""

import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.base import runnable_groups
from d9d.model_state.mapper.compose import (
    ModelStateMapperParallel,
    ModelStateMapperPrefixScope,
    ModelStateMapperSelectGroups,
    ModelStateMapperSequential,
    ModelStateMapperShard,
    filter_empty_mappers,
)
from d9d.model_state.mapper.leaf import (
    ModelStateMapperChunkTensors,
    ModelStateMapperConcatenateTensors,
    ModelStateMapperDrop,
    ModelStateMapperGatherFullTensor,
    ModelStateMapperIdentity,
    ModelStateMapperInterleavedToStacked,
    ModelStateMapperRename,
    ModelStateMapperSlice,
    ModelStateMapperSqueeze,
    ModelStateMapperStackTensors,
    ModelStateMapperTie,
    ModelStateMapperTranspose,
)
from d9d.model_state.mapper.pieces import Box, TensorPieces

Tensors = dict[str, torch.Tensor]
Rename = ModelStateMapperRename
Parallel, Sequential = ModelStateMapperParallel, ModelStateMapperSequential


def group(inputs: str, outputs: str) -> StateGroup:
    return StateGroup(frozenset(inputs.split()), frozenset(outputs.split()))


def run(mapper: ModelStateMapper, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Apply all groups whose inputs there are, and hold the traces against them."""
    outputs: Tensors = {}
    for own in mapper.state_dependency_groups():
        inputs = {name: tensors[name] for name in own.inputs if name in tensors}
        if not inputs:
            continue
        made = mapper.apply(dict(inputs))
        assert made.keys() == own.outputs
        traced = mapper.trace({n: TensorPieces.whole(n, t.shape, t.dtype) for n, t in inputs.items()})
        if traced is not None:
            assert traced.keys() == made.keys()
            for name, pieces in traced.items():
                target = torch.empty(pieces.shape, dtype=pieces.dtype)
                pieces.fill(target, Box.whole(pieces.shape), lambda source, box: tensors[source][box.slices])
                assert torch.equal(target, made[name])
        outputs.update(made)
    return outputs


def assert_same(actual: Tensors, expected: Mapping[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


A, B, C = torch.arange(6).view(2, 3), torch.arange(10, 16).view(2, 3), torch.arange(20, 26).view(2, 3)


# ---- Parallel ---------------------------------------------------------------------------------------------------------


def test_parallel_gives_each_group_to_its_mapper():
    mapper = Parallel(
        [Rename("a", "x"), Parallel([ModelStateMapperConcatenateTensors(["b", "c"], "bc", 0, sizes=[2, 2])])]
    )
    assert mapper.state_dependency_groups() == {group("a", "x"), group("b c", "bc")}
    assert_same(run(mapper, {"a": A, "b": B, "c": C}), {"x": A, "bc": torch.cat([B, C])})
    assert_same(run(mapper.inverse(), {"x": A, "bc": torch.cat([B, C])}), {"a": A, "b": B, "c": C})


def test_parallel_may_exchange_names():
    mapper = Parallel([Rename("a", "b"), Rename("b", "a")])
    assert_same(run(mapper, {"a": A, "b": B}), {"a": B, "b": A})


def test_parallel_names_all_collisions_at_once():
    with pytest.raises(ValueError, match="cannot be used") as raised:
        Parallel([Rename("a", "x"), Rename("a", "y"), Rename("b", "z"), Rename("c", "z"), Rename("d", "d")])
    message = str(raised.value)
    assert "read by more than one group: 'a' ('a' -> 'x'; 'a' -> 'y')" in message
    assert "produced by more than one group: 'z' ('b' -> 'z'; 'c' -> 'z')" in message
    assert "'d'" not in message


def test_the_same_mapper_twice_collides():
    mapper = ModelStateMapperIdentity("a")
    with pytest.raises(ValueError, match="read by more than one"):
        Parallel([mapper, mapper])


def test_compositions_do_not_follow_their_lists():
    # So nothing can contain itself.
    mappers: list[ModelStateMapper] = [Rename("a", "b")]
    compositions = [Parallel(mappers), Sequential(mappers)]
    mappers.extend(compositions)
    for composition in compositions:
        assert composition.state_dependency_groups() == {group("a", "b")}
        assert len(composition.explain().splitlines()) <= 3


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("layers.0.weigth", r"'layers.0.weigth' \(nearest: 'layers.0.weight'\), which none"),
        ("", "given nothing"),
        ("b", "given no 'c' for the group 'b', 'c'"),
        ("b c layers.0.weight", "given 'layers.0.weight' of another group for the group 'b', 'c'"),
    ],
)
@pytest.mark.parametrize("composition", [Parallel, lambda mappers: Sequential([Parallel(mappers)])])
def test_groups_that_are_none_are_refused(composition: type[ModelStateMapperParallel], names: str, message: str):
    mapper = composition([ModelStateMapperConcatenateTensors(["b", "c"], "bc", 0), Rename("layers.0.weight", "w")])
    with pytest.raises(ValueError, match=message):
        mapper.apply(dict.fromkeys(names.split(), A))


# ---- Sequential -------------------------------------------------------------------------------------------------------


def test_sequential_merges_what_hangs_together():
    mapper = Sequential(
        [
            Parallel([Rename("a", "x.0"), Rename("b", "x.1"), Rename("c", "y")]),
            ModelStateMapperStackTensors(["x.0", "x.1"], "x", 0),
            Parallel([ModelStateMapperTranspose("x", (0, 2)), ModelStateMapperChunkTensors("y", ["y.0", "y.1"], 0)]),
        ]
    )
    assert mapper.state_dependency_groups() == {group("a b", "x"), group("c", "y.0 y.1")}
    expected = {"x": torch.stack([A, B]).transpose(0, 2), "y.0": C[:1], "y.1": C[1:]}
    assert_same(run(mapper, {"a": A, "b": B, "c": C}), expected)
    assert_same(run(mapper.inverse(), expected), {"a": A, "b": B, "c": C})


def test_stages_are_filled_with_what_goes_past_them():
    mapper = Sequential(
        [
            Rename("a", "x"),  # read by nobody: an output
            Rename("b", "y"),
            ModelStateMapperConcatenateTensors(["y", "c"], "yc", 0, sizes=[2, 2]),  # c comes from the source
            ModelStateMapperIdentity("d"),
        ]
    )
    assert mapper.state_dependency_groups() == {group("a", "x"), group("b c", "yc"), group("d", "d")}
    sources = {"a": A, "b": B, "c": C, "d": A}
    expected = {"x": A, "yc": torch.cat([B, C]), "d": A}
    assert_same(run(mapper, sources), expected)
    assert_same(run(mapper.inverse(), expected), sources)


def test_one_stage_and_none():
    assert Sequential([]).state_dependency_groups() == frozenset()
    assert_same(run(Sequential([Rename("a", "b")]), {"a": A}), {"b": A})


def test_names_may_be_used_again_in_later_stages():
    exchange = Parallel([Rename("a", "b"), Rename("b", "a")])
    joined = Sequential([exchange, exchange, exchange, ModelStateMapperConcatenateTensors(["a", "b"], "a", 0)])
    assert joined.state_dependency_groups() == {group("a b", "a")}
    assert_same(run(joined, {"a": A, "b": B}), {"a": torch.cat([B, A])})


def test_a_chain_over_many_stages_is_one_group():
    # Stage k joins neighbours k and k + 1, so that everything hangs together in the end.
    stages: list[ModelStateMapper] = [
        Parallel(
            [ModelStateMapperConcatenateTensors([f"{k}", f"s.{k}"], f"{k + 1}", 0), Rename(f"free.{k}", f"done.{k}")]
        )
        for k in range(50)
    ]
    mapper = Sequential(stages)
    expected = StateGroup(frozenset(["0", *(f"s.{k}" for k in range(50))]), frozenset(["50"]))
    assert expected in mapper.state_dependency_groups()
    assert len(mapper.state_dependency_groups()) == 51
    made = mapper.apply({name: torch.tensor([-1 if name == "0" else int(name[2:])]) for name in expected.inputs})
    assert made["50"].tolist() == list(range(-1, 50))


def test_sequential_names_all_problems_at_once():
    with pytest.raises(ValueError, match="cannot be used") as raised:
        Sequential(
            [
                Parallel([Rename("w.weight", "x.weight"), Rename("v", "u")]),
                Parallel([Rename("w.weight", "z"), Rename("b", "u")]),
            ]
        )
    message = str(raised.value)
    assert "stage 2 cannot complete groups: stage 1 has used up 'w.weight' (nearest: 'x.weight')" in message
    assert "stage 2 produces what an earlier one has produced: 'u'" in message


def test_a_tensor_that_two_stages_read_is_refused():
    slices = [ModelStateMapperSlice("a", f"part.{start}", 0, start, 1) for start in range(2)]
    with pytest.raises(ValueError, match="stage 2 cannot complete groups: stage 1 has used up 'a'"):
        Sequential(list(slices))


def test_memory_of_intermediate_tensors_is_freed_stage_by_stage():
    alive: list[int] = []
    created: list[weakref.ref[torch.Tensor]] = []

    class Copy(ModelStateMapper):
        def state_dependency_groups(self) -> frozenset[StateGroup]:
            return frozenset([group("a", "a")])

        def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            copied = group["a"] + 1
            created.append(weakref.ref(copied))
            alive.append(sum(ref() is not None for ref in created))
            return {"a": copied}

    mapper = Sequential([Copy() for _ in range(5)])
    assert mapper.apply({"a": torch.zeros(1)})["a"].item() == 5
    assert max(alive) == 2  # what a stage reads, and what it makes


# ---- optional inputs ----------------------------------------------------------------------------------------------


def test_optional_inputs_pass_through_compositions():
    tie = ModelStateMapperTie(["embed", "lm_head"], ["embed", "lm_head"])
    drop = ModelStateMapperDrop(["position_ids"])
    scoped = ModelStateMapperPrefixScope(Parallel([tie, drop]), source_prefix="model.")
    mapper = Sequential([Parallel([scoped, Rename("a", "b")]), ModelStateMapperTranspose("embed", (0, 1))])
    assert mapper.optional_inputs() == {"model.lm_head", "model.position_ids"}
    assert_same(run(mapper, {"model.embed": A, "a": B}), {"embed": A.t(), "lm_head": A, "b": B})
    sources = {"model.embed": A, "model.lm_head": A, "a": B, "model.position_ids": C}
    assert_same(run(mapper, sources), {"embed": A.t(), "lm_head": A, "b": B})


def test_what_only_optional_tensors_are_made_of_is_optional():
    tie = ModelStateMapperTie(["embed", "head"], ["embed", "head"])
    two_stages_before = Parallel([Rename("e", "e.1"), Rename("h", "h.1")])
    mapper = Sequential([two_stages_before, Parallel([Rename("e.1", "embed"), Rename("h.1", "head")]), tie])
    assert mapper.state_dependency_groups() == {group("e h", "embed head")}
    assert mapper.optional_inputs() == {"h"}
    assert_same(run(mapper, {"e": A}), {"embed": A, "head": A})
    assert_same(run(mapper, {"e": A, "h": A}), {"embed": A, "head": A})
    with pytest.raises(ValueError, match="tied, but their values differ"):
        mapper.apply({"e": A, "h": B})
    with pytest.raises(ValueError, match="given no 'e'"):
        mapper.apply({"h": A})


def test_half_of_an_optional_tensor_is_refused():
    joined = ModelStateMapperConcatenateTensors(["h.0", "h.1"], "head", 0)
    mapper = Sequential([joined, ModelStateMapperTie(["embed", "head"], ["embed", "head"])])
    assert mapper.optional_inputs() == {"h.0", "h.1"}
    assert_same(run(mapper, {"embed": A}), {"embed": A, "head": A})
    with pytest.raises(ValueError, match=r"stage 1 needs 'h.1' to make 'head'"):
        mapper.apply({"embed": A, "h.0": A[:1]})


def test_what_a_stage_drops_may_be_missing():
    drops = Parallel([Rename("i", "j"), ModelStateMapperDrop(["rotary"])])
    mapper = Sequential([Rename("ids", "i"), drops, ModelStateMapperDrop(["j"]), Rename("w", "x")])
    runnable, lacking = runnable_groups(mapper, ["w"])
    assert (runnable, lacking) == ([group("w", "x")], {})
    assert_same(mapper.apply({"w": A}), {"x": A})


def test_outputs_are_not_optional():
    mapper = Sequential([ModelStateMapperTie(["a"], ["a", "b"]), ModelStateMapperTie(["c", "b"], ["c"])])
    # b is optional for c, but a is an output as well
    assert mapper.optional_inputs() == frozenset()


# ---- PrefixScope, SelectGroups, Shard -------------------------------------------------------------------------------


def test_prefixes_go_before_all_names():
    layer = Parallel([Rename("q", "attn.q"), ModelStateMapperTranspose("w", (0, 1))])
    mapper = Parallel(
        [ModelStateMapperPrefixScope(layer, f"model.layers.{index}.", f"h.{index}.") for index in range(2)]
    )
    assert group("model.layers.1.w", "h.1.w") in mapper.state_dependency_groups()
    sources = {f"model.layers.{i}.{name}": t + i for i in range(2) for name, t in [("q", A), ("w", B)]}
    expected = {f"h.{i}.{name}": t + i for i in range(2) for name, t in [("attn.q", A), ("w", B.t())]}
    assert_same(run(mapper, sources), expected)
    assert_same(run(mapper.inverse(), expected), sources)
    with pytest.raises(ValueError, match=r"'q' does not begin with the source prefix 'm.'"):
        ModelStateMapperPrefixScope(layer, "m.").apply({"q": A})


def test_selected_groups_and_their_inverse():
    mapper = Parallel([Rename("a", "x"), ModelStateMapperConcatenateTensors(["b", "c"], "bc", 0, sizes=[2, 2])])
    selected = ModelStateMapperSelectGroups(mapper, lambda own: "bc" in own.outputs)
    assert selected.state_dependency_groups() == {group("b c", "bc")}
    assert_same(run(selected, {"b": B, "c": C}), {"bc": torch.cat([B, C])})
    assert selected.inverse().state_dependency_groups() == {group("bc", "b c")}
    with pytest.raises(ValueError, match="'a', which none of its groups reads"):
        selected.apply({"a": A})


def test_some_outputs_of_selected_groups():
    mapper = Parallel([ModelStateMapperChunkTensors("ab", ["a", "b"], 0), Rename("x", "y"), Rename("u", "v")])
    selected = ModelStateMapperSelectGroups(mapper, lambda own: "v" not in own.outputs, outputs=["b", "y", "v", "none"])
    assert selected.state_dependency_groups() == {group("ab", "b"), group("x", "y")}
    assert_same(run(selected, {"ab": A, "x": B}), {"b": A[1:], "y": B})
    with pytest.raises(NotImplementedError, match=r"cannot be inverted without 'a', which they make"):
        selected.inverse()
    # Nothing is left out of what is selected here.
    complete = ModelStateMapperSelectGroups(mapper, lambda own: "v" in own.outputs, outputs=["v"])
    assert_same(run(complete.inverse(), {"v": C}), {"u": C})


@pytest.mark.parametrize(("num_groups", "num_shards"), [(7, 3), (3, 5), (8, 4), (1, 1)])
def test_shards_have_every_group_once_and_are_balanced(num_groups: int, num_shards: int):
    mapper = Parallel([Rename(f"a.{index}", f"b.{index}") for index in range(num_groups)])
    shards = [ModelStateMapperShard(mapper, num_shards, index) for index in range(num_shards)]
    counts = [len(shard.state_dependency_groups()) for shard in shards]
    assert sum(counts) == num_groups
    assert max(counts) - min(counts) <= 1
    assert frozenset().union(*(shard.state_dependency_groups() for shard in shards)) == mapper.state_dependency_groups()
    sources = {f"a.{index}": torch.tensor(index) for index in range(num_groups)}
    outputs: Tensors = {}
    back: Tensors = {}
    for shard in shards:
        own = {name: sources[name] for own in shard.state_dependency_groups() for name in own.inputs}
        made = run(shard, own)
        outputs.update(made)
        back.update(run(shard.inverse(), made))
    assert_same(outputs, {f"b.{index}": torch.tensor(index) for index in range(num_groups)})
    assert_same(back, sources)


def test_shards_that_are_none():
    for total, current in [(2, 2), (2, -1), (0, 0)]:
        with pytest.raises(ValueError, match=rf"current_shard \({current}\).*total_shards is {total}"):
            ModelStateMapperShard(Parallel([]), total, current)


def test_mappers_without_groups_are_filtered():
    mapper = Rename("a", "b")
    assert filter_empty_mappers([Parallel([]), mapper, Sequential([])]) == [mapper]


# ---- inverse, explain -----------------------------------------------------------------------------------------------


def test_all_reasons_why_there_is_no_inverse():
    mapper = Sequential([Parallel([ModelStateMapperSqueeze("a"), ModelStateMapperSlice("b", "c", 0, 0, 1)])])
    with pytest.raises(NotImplementedError, match=r"(?s)Squeeze of 'a'.*Slice has no inverse"):
        mapper.inverse()


def test_reasons_are_bounded():
    mapper = Parallel([ModelStateMapperSqueeze(f"a.{index}") for index in range(100)])
    with pytest.raises(NotImplementedError) as raised:
        mapper.inverse()
    assert str(raised.value).splitlines()[-1] == "and 90 more"


def test_a_reason_that_all_layers_have_is_given_once():
    layer = Parallel([ModelStateMapperSqueeze("a"), ModelStateMapperSlice("b", "c", 0, 0, 1)])
    layers = Parallel([ModelStateMapperPrefixScope(layer, f"{index}.", f"{index}.") for index in range(32)])
    with pytest.raises(NotImplementedError) as raised:
        layers.inverse()
    assert str(raised.value).count("Squeeze of 'a'") == 1
    assert str(raised.value).endswith("(32 times)")


def test_what_was_dropped_is_not_made_again():
    renames = Parallel([Rename("ids", "i"), Rename("w", "x")])
    mapper = Sequential([renames, ModelStateMapperDrop(["i"])])
    assert_same(run(mapper, {"ids": C, "w": A}), {"x": A})
    assert mapper.inverse().state_dependency_groups() == {group("x", "w")}
    assert_same(run(mapper.inverse(), {"x": A}), {"w": A})
    assert Sequential([Rename("ids", "i"), ModelStateMapperDrop(["i"])]).inverse().state_dependency_groups() == set()
    half = Sequential([ModelStateMapperChunkTensors("ab", ["a", "b"], 0), ModelStateMapperDrop(["b"])])
    with pytest.raises(NotImplementedError, match="'ab' cannot be made again without 'b', which a stage drops"):
        half.inverse()


def test_explain_is_a_tree():
    mapper = Sequential(
        [
            Parallel([Rename("b", "x"), Rename("a", "y"), ModelStateMapperDrop(["ids"])]),
            ModelStateMapperPrefixScope(ModelStateMapperConcatenateTensors(["x", "y"], "xy", 0), target_prefix="m."),
        ]
    )
    assert mapper.explain() == (
        "Sequential\n"
        "  stage 1\n"
        "    Parallel\n"
        "      b -> x  (Rename)\n"
        "      a -> y  (Rename)\n"
        "      ids -> nothing  (Drop)\n"
        "  stage 2\n"
        "    PrefixScope '' -> 'm.'\n"
        "      x, y -> xy  (ConcatenateTensors)"
    )
    shard = ModelStateMapperShard(mapper, 2, 0)
    assert shard.explain() == "Shard 0 of 2\n  1 groups of Sequential\n    a, b -> m.xy"


def test_a_mapper_without_anything_of_ours():
    class Scale(ModelStateMapper):
        def state_dependency_groups(self) -> frozenset[StateGroup]:
            return frozenset([group("a", "a.scaled")])

        def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"a.scaled": group["a"] * 2}

    mapper = Sequential([Rename("x", "a"), Parallel([Scale()]), ModelStateMapperTranspose("a.scaled", (0, 1))])
    assert mapper.trace({"x": TensorPieces.whole("x", (2, 3), torch.int64)}) is None
    assert_same(run(mapper, {"x": A}), {"a.scaled": (A * 2).t()})
    assert "a -> a.scaled  (Scale)" in mapper.explain()
    with pytest.raises(NotImplementedError, match="Scale has no inverse"):
        mapper.inverse()


# ---- random graphs --------------------------------------------------------------------------------------------------


@st.composite
def random_stages(draw: st.DrawFn) -> tuple[list[ModelStateMapper], Tensors, Tensors]:
    """Stages over names that are there, with what torch makes of them stage by stage."""
    sources = {f"t{index}": torch.arange(6).view(2, 3) + 10 * index for index in range(draw(st.integers(1, 5)))}
    tensors = dict(sources)
    stages: list[ModelStateMapper] = []
    for stage in range(draw(st.integers(1, 4))):
        names = draw(st.permutations(sorted(tensors)))
        mappers: list[ModelStateMapper] = []
        made: Tensors = {}
        while names and draw(st.booleans()):
            first = names.pop()
            own = tensors.pop(first)
            target = f"s{stage}.{first}"
            match draw(st.integers(0, 4)):
                case 0:
                    mappers.append(Rename(first, target))
                    made[target] = own
                case 1:
                    mappers.append(ModelStateMapperTranspose(first, (0, -1)))
                    made[first] = own.transpose(0, -1)
                case 2 if names and tensors[names[-1]].shape == own.shape:
                    other = names.pop()
                    sizes = [own.shape[0]] * 2
                    mappers.append(ModelStateMapperConcatenateTensors([first, other], target, 0, sizes=sizes))
                    made[target] = torch.cat([own, tensors.pop(other)])
                case 3 if own.shape[0] % 2 == 0:
                    mappers.append(ModelStateMapperChunkTensors(first, [target, target + "'"], 0))
                    made[target], made[target + "'"] = own.chunk(2)
                case 4 if own.shape[0] % 4 == 0:
                    mappers.append(ModelStateMapperInterleavedToStacked(first, target, 0, [1, 1], own.shape[0] // 2))
                    made[target] = torch.cat([own[0::2], own[1::2]])
                case _:
                    mappers.append(ModelStateMapperIdentity(first))
                    made[first] = own
        stages.append(Parallel(mappers))
        tensors.update(made)
    return stages, sources, tensors


@hypothesis.given(graph=random_stages())
@hypothesis.settings(max_examples=200, deadline=None)
def test_random_stages_give_what_torch_gives_and_come_back(graph: tuple[list[ModelStateMapper], Tensors, Tensors]):
    stages, sources, expected = graph
    mapper = Sequential(stages)
    read = {name for own in mapper.state_dependency_groups() for name in own.inputs}
    made = run(mapper, sources)
    # What no stage reads is not the mapper's business.
    assert_same(made | {name: sources[name] for name in sources.keys() - read}, expected)
    assert_same(run(mapper.inverse(), made), {name: sources[name] for name in read})


# ---- one order on all ranks -----------------------------------------------------------------------------------------

ORDER = """
import torch
from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperParallel, ModelStateMapperSequential
from d9d.model_state.mapper.leaf import ModelStateMapperConcatenateTensors

class Noisy(ModelStateMapper):
    def __init__(self, name):
        self.name = name
    def state_dependency_groups(self):
        return frozenset([StateGroup(frozenset([self.name]), frozenset([self.name]))])
    def apply(self, group):
        print(self.name)
        return dict(group)

names = [f"layer.{index}.{part}" for index in range(20) for part in ("gate", "up")]
stages = [ModelStateMapperParallel([Noisy(name) for name in names]), ModelStateMapperConcatenateTensors(names, "all", 0)]
ModelStateMapperSequential(stages).apply({name: torch.zeros(1) for name in names})
"""


def test_steps_run_in_one_order_whatever_the_hash_seed():
    orders = {
        subprocess.run(
            [sys.executable, "-c", ORDER],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(orders) == 1
    assert len(orders.pop().splitlines()) == 40


@pytest.mark.world_size(2)
def test_gathering_in_a_sequence_gives_every_layer_its_own_values():
    mesh = init_device_mesh("cpu", (2,))
    names = [f"layer.{index}.{part}" for index in range(24) for part in ("gate", "up")]
    full = {name: torch.full((4, 2), float(index)) for index, name in enumerate(names)}
    mapper = Sequential(
        [
            Parallel([ModelStateMapperGatherFullTensor(name) for name in names]),
            ModelStateMapperStackTensors(names, "all", 0),
        ]
    )
    # Each rank hands the tensors over in another order.
    given = list(reversed(names)) if dist.get_rank() else names
    sharded = {name: distribute_tensor(full[name], mesh, [Shard(0)]) for name in names}
    made = mapper.apply({name: sharded[name] for name in given})
    assert torch.equal(made["all"], torch.stack(list(full.values())))


# ---- large graphs ---------------------------------------------------------------------------------------------------


def count_calls(function: Callable[[], None]) -> int:
    """Return how many functions are called, those of C too: what the time depends on, whatever else the machine does."""
    num_calls = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return num_calls


def build_layers(num_layers: int) -> None:
    parts = "qkvo"
    stages = [
        Parallel([Rename(f"m.{i}.{part}", f"l.{i}.{part}") for i in range(num_layers) for part in parts]),
        Parallel(
            [
                ModelStateMapperConcatenateTensors([f"l.{i}.{part}" for part in "qkv"], f"l.{i}.qkv", 0)
                for i in range(num_layers)
            ]
        ),
        Parallel(
            [ModelStateMapperTranspose(f"l.{i}.{part}", (0, 1)) for i in range(num_layers) for part in ("qkv", "o")]
        ),
    ]
    assert len(Sequential(stages).state_dependency_groups()) == 2 * num_layers


def test_building_is_linear_in_tensors():
    small, large = count_calls(partial(build_layers, 50)), count_calls(partial(build_layers, 500))
    assert large < 11 * small  # 100 x if quadratic
