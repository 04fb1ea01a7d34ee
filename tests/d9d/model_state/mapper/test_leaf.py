"""Each mapper of one tensor against torch's own operation, as data and as pieces, and back through its inverse."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.leaf import (
    ModelStateMapperDistribute,
    ModelStateMapperGatherFullTensor,
    ModelStateMapperIdentity,
    ModelStateMapperRename,
    ModelStateMapperSelectChildModules,
    ModelStateMapperSqueeze,
    ModelStateMapperTranspose,
    ModelStateMapperUnsqueeze,
)
from tests.d9d.model_state.mapper.support import (
    Case,
    Tensors,
    assert_distributed_gives_the_same,
    assert_maps_and_comes_back,
    assert_same,
    can_be_distributed,
    numbers,
    traced,
)

A, B = numbers(4, 3), numbers(2, 3, first=20)
SCALAR, EMPTY = torch.tensor(7), torch.zeros(0, 3)

CASES: dict[str, Case] = {
    "identity": (ModelStateMapperIdentity("a.b"), {"a.b": SCALAR}, {"a.b": SCALAR}),
    "rename": (ModelStateMapperRename("a.b", "c"), {"a.b": EMPTY}, {"c": EMPTY}),
    "select": (ModelStateMapperSelectChildModules(["w.x"], "m.n"), {"m.n.w.x": A}, {"w.x": A}),
    "transpose": (ModelStateMapperTranspose("a", (0, -1)), {"a": A}, {"a": A.t()}),
    "squeeze": (ModelStateMapperSqueeze("a", -2), {"a": A.unsqueeze(1)}, {"a": A}),
    "unsqueeze": (ModelStateMapperUnsqueeze("a", -1), {"a": A}, {"a": A[..., None]}),
    "distribute on no mesh": (ModelStateMapperDistribute("a", None, None), {"a": A}, {"a": A}),
    "gather a plain tensor": (ModelStateMapperGatherFullTensor("a"), {"a": A}, {"a": A}),
}


@pytest.mark.parametrize("case", CASES)
def test_data_pieces_and_the_way_back_agree(case: str):
    assert_maps_and_comes_back(CASES[case])


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


@pytest.mark.parametrize(
    ("mapper", "group", "error", "message"),
    [
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


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", [case for case in CASES if can_be_distributed(CASES[case])])
def test_distributed_tensors_give_the_same(case: str):
    assert_distributed_gives_the_same(CASES[case])
