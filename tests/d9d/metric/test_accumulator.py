"""Running values, their exactness, and their reduction."""

import pytest
import torch
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.metric.component import MetricAccumulator, MetricReduceOp, sync_accumulators


def total(value=0.0, dtype=torch.float64):
    return MetricAccumulator(torch.tensor(value, dtype=dtype))


@pytest.mark.parametrize(("op", "initial", "expected"), [("sum", 0.0, 4.0), ("max", -9.0, 3.0), ("min", 9.0, -1.0)])
def test_operations(op, initial, expected):
    accumulator = MetricAccumulator(torch.tensor(initial), MetricReduceOp(op))
    for value in (2.0, torch.tensor(-1), torch.tensor(3.0, dtype=torch.bfloat16)):
        accumulator.update(value)
    assert accumulator.value.item() == expected
    accumulator.reset()
    assert accumulator.value.item() == initial


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_counts_go_on_beyond_what_float32_holds(dtype):
    accumulator = total(0, dtype)
    accumulator.update(2**24)
    accumulator.update(1)
    assert accumulator.value.item() == 16_777_217


def test_a_result_does_not_change_with_later_updates():
    accumulator = total()
    accumulator.update(1.0)
    result = accumulator.value
    accumulator.update(1.0)
    assert result.item() == 1.0


def test_the_initial_value_is_copied():
    initial = torch.zeros(2)
    accumulator = MetricAccumulator(initial)
    accumulator.update(torch.ones(2))
    assert initial.tolist() == [0.0, 0.0]


def test_fractions_do_not_vanish_in_an_integer_sum():
    with pytest.raises(ValueError, match=r"int64 would cut fractions off a torch\.float32"):
        total(0, torch.int64).update(0.5)


def test_state_holds_the_running_value():
    accumulator = MetricAccumulator(torch.zeros(2))
    accumulator.update(torch.tensor([1.0, 2.0]))
    other = MetricAccumulator(torch.zeros(2))
    other.load_state_dict({key: value.clone() for key, value in accumulator.state_dict().items()})
    other.update(torch.tensor([1.0, 1.0]))
    assert other.value.tolist() == [2.0, 3.0]
    with pytest.raises(ValueError, match=r"shape \(2,\), but this one has \(\)"):
        total().load_state_dict(accumulator.state_dict())


def test_without_ranks_a_reduction_is_a_copy():
    accumulator = total()
    accumulator.update(2.0)
    accumulator.sync(DeviceMeshParameters().build())
    assert accumulator.value.item() == 2.0
    accumulator.sync()
    assert accumulator.value.item() == 2.0


@pytest.mark.world_size(2)
def test_reducing_again_counts_nothing_twice():
    context = DeviceMeshParameters(data_parallel_replicate=2).build()
    accumulator = total()
    accumulator.update(1.0 + dist.get_rank())
    for _ in range(2):
        accumulator.sync(context)
        assert accumulator.value.item() == 3.0
    accumulator.update(10.0)
    assert accumulator.value.item() == 11.0 + dist.get_rank()
    accumulator.sync()
    assert accumulator.value.item() == 23.0
    assert accumulator.state_dict()["value"].item() == 11.0 + dist.get_rank()


@pytest.mark.world_size(2)
def test_tensor_parallel_peers_count_once():
    context = DeviceMeshParameters(tensor_parallel=2).build()
    accumulator = total()
    accumulator.update(5.0)
    accumulator.sync(context)
    assert accumulator.value.item() == 5.0


@pytest.mark.world_size(4)
def test_all_other_dimensions_are_summed_over():
    context = DeviceMeshParameters(pipeline_parallel=2, context_parallel_shard=2).build()
    accumulator = total()
    accumulator.update(float(10**context.rank))
    accumulator.sync(context)
    assert accumulator.value.item() == 1111.0


@pytest.mark.world_size(2)
def test_mixed_kinds_are_reduced_together():
    rank = dist.get_rank()
    vector = MetricAccumulator(torch.zeros(2, 2, dtype=torch.float64))
    count = total(0, torch.int64)
    highest = MetricAccumulator(torch.tensor(-1.0), MetricReduceOp.max)
    lowest = MetricAccumulator(torch.tensor(9.0), MetricReduceOp.min)
    any_true = MetricAccumulator(torch.tensor(False), MetricReduceOp.max)
    scalar = total()
    vector.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (rank + 1))
    count.update(2**53 + rank)
    highest.update(float(rank))
    lowest.update(float(rank))
    any_true.update(rank == 1)
    scalar.update(0.5)
    sync_accumulators([vector, count, highest, lowest, any_true, scalar], dist.group.WORLD)
    assert vector.value.tolist() == [[3.0, 6.0], [9.0, 12.0]]
    assert count.value.item() == 2**54 + 1
    assert highest.value.item() == 1.0
    assert lowest.value.item() == 0.0
    assert any_true.value.item() is True
    assert scalar.value.item() == 1.0
