"""Records of lanes."""

from collections import Counter

import numpy as np
import pytest

from d9d.dataset.lanes import BatchSchedule, DataPlan, LaneRecords, SampleError, Tail


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
