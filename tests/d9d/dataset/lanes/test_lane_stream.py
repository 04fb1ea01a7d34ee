"""Records of lanes, and the table of their states over ranks."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from d9d.dataset.lanes import BatchSchedule, DataPlan, LaneRecords, LaneStates, SampleError, Tail, WrapPacker


class Numbers:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


class Seeded(Numbers):
    def getitem_seeded(self, index: int, seed: int):
        return (index, seed)


def plan(**changes) -> DataPlan:
    return DataPlan(**{"num_samples": 10, "schedule": BatchSchedule.constant(8), "microbatch_size": 2, **changes})


def test_lanes_deal_out_the_order_in_turn():
    built = plan()
    order = built.order.samples(np.arange(40)).tolist()
    lanes = [LaneRecords(Numbers(), built, lane) for lane in range(4)]
    assert [[records(number) for number in range(10)] for records in lanes] == [order[lane::4] for lane in range(4)]
    # 40 records of 10 samples: 4 epochs.
    assert Counter(order) == dict.fromkeys(range(10), 4)


def test_seeds_differ_by_position():
    lanes = [LaneRecords(Seeded(), plan(), lane) for lane in range(4)]
    assert len({records(number)[1] for records in lanes for number in range(10)}) == 40


def test_a_record_that_cannot_be_loaded_is_named():
    class Failing(Numbers):
        def __getitem__(self, index: int) -> int:
            raise StopIteration

    records = LaneRecords(Failing(), plan(shuffle=False), 1)
    with pytest.raises(SampleError, match=r"sample 3 .*\(position 13 of the run, record 3 of lane 1\).*StopIteration"):
        records(3)


@pytest.mark.parametrize(
    ("changes", "lane", "message"), [({"tail": Tail.drop}, 0, "not 'drop'"), ({}, 4, r"lane \(4\) must be from 0 to 3")]
)
def test_records_that_are_not_there_are_refused(changes, lane, message):
    with pytest.raises(ValueError, match=message):
        LaneRecords(Numbers(), plan(**changes), lane)


def packers(vectors: list[list[int]]) -> list[WrapPacker]:
    built = [WrapPacker(lambda number: torch.ones(3), 2) for _ in vectors]
    for packer, vector in zip(built, vectors, strict=True):
        packer.load_state_vector(vector)
    return built


def test_states_are_rows():
    states = LaneStates.of(packers([[1, 2], [3, 4]]), num_lanes=4, first_lane=2)
    assert states.rows.dtype is torch.int64
    assert states.rows.tolist() == [[1, 2], [3, 4]]
    others = packers([[0, 0], [0, 0]])
    states.load_into(others)
    assert [list(packer.state_vector()) for packer in others] == [[1, 2], [3, 4]]


def test_states_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="2 states do not fit 1 streams"):
        LaneStates.of(packers([[1, 2], [3, 4]]), 4, 2).load_into(packers([[0, 0]]))
    with pytest.raises(ValueError, match="lanes 3 to 4 are not all below 4"):
        LaneStates.of(packers([[1, 2], [3, 4]]), 4, 3)
    with pytest.raises(ValueError, match="of one length"):
        LaneStates.of([], 4, 0)


@pytest.mark.world_size(4)
def test_the_table_is_sharded_over_data_parallel_ranks_only():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp_rank = mesh.get_local_rank("dp")
    first = dp_rank * 2
    states = LaneStates.of(packers([[first, 7], [first + 1, 7]]), num_lanes=4, first_lane=first)
    table = states.as_dtensor(mesh, ["dp"])
    assert table.placements == (Shard(0), Replicate())
    assert table.full_tensor().tolist() == [[0, 7], [1, 7], [2, 7], [3, 7]]
    with pytest.raises(ValueError, match=r"no axes \['pp'\]"):
        states.as_dtensor(mesh, ["pp"])
    with pytest.raises(ValueError, match="of 4 lanes, but it holds 2"):
        states.as_dtensor(mesh, ["dp", "tp"])


@pytest.mark.world_size(4)
def test_replicated_and_sharded_data_parallel_axes_count_as_one():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    rank = torch.distributed.get_rank()
    table = LaneStates.of(packers([[rank, 0]]), 4, rank).as_dtensor(mesh, ["dp_replicate", "dp_shard"])
    assert table.full_tensor().tolist() == [[0, 0], [1, 0], [2, 0], [3, 0]]


@pytest.mark.world_size(4)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_a_checkpoint_of_the_table_loads_on_another_number_of_ranks(shape, tmp_path):
    saved_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    first = saved_mesh.get_local_rank("dp") * 2
    saved = LaneStates.of(packers([[first, 7], [first + 1, 7]]), 4, first)
    dcp.save({"lanes": saved.as_dtensor(saved_mesh, ["dp"])}, checkpoint_id=tmp_path)

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    lanes_here = 4 // shape[0]
    first = mesh.get_local_rank("dp") * lanes_here
    streams = packers([[0, 0]] * lanes_here)
    loaded = LaneStates.of(streams, 4, first)
    dcp.load({"lanes": loaded.as_dtensor(mesh, ["dp"])}, checkpoint_id=tmp_path)
    loaded.load_into(streams)
    assert [list(packer.state_vector()) for packer in streams] == [[first + i, 7] for i in range(lanes_here)]
