"""Sums and weighted means, by hand."""

import math

import pytest
import torch

from d9d.core.dist_context import DeviceMeshParameters
from d9d.metric.impl.aggregation import SumMetric, WeightedMeanMetric

VALUES, WEIGHTS = torch.tensor([1.0, math.nan, 3.0]), torch.tensor([1.0, 1.0, 2.0])


def test_sum_takes_numbers_and_all_elements():
    metric = SumMetric()
    metric.update(2**24)
    metric.update(torch.tensor([1, 2]))
    metric.update(torch.tensor(0.5, dtype=torch.bfloat16))
    assert metric.compute().item() == 2**24 + 3.5
    metric.reset()
    assert metric.compute().item() == 0.0


def test_mean_by_hand():
    metric = WeightedMeanMetric()
    metric.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, 3.0]))
    metric.update(6.0, 2)
    # The products 1, 6, 3, 12 and 12 over the weights 1, 3, 1, 3 and 2.
    assert metric.compute().item() == pytest.approx(3.4)
    assert metric.accumulated_weight.item() == 10.0


def test_weights_count_beyond_what_float32_holds():
    metric = WeightedMeanMetric()
    metric.update(torch.tensor(1.0), torch.tensor(float(2**24)))
    metric.update(torch.tensor(1.0), torch.tensor(1.0))
    assert metric.accumulated_weight.item() == 16_777_217
    assert metric.compute().item() == 1.0


def test_nan_shows_unless_it_is_ignored_together_with_its_weight():
    metric = WeightedMeanMetric()
    metric.update(VALUES, WEIGHTS)
    assert metric.compute().isnan()
    metric = WeightedMeanMetric(nan_policy="ignore")
    metric.update(VALUES, WEIGHTS)
    assert metric.compute().item() == pytest.approx(7 / 3)
    assert metric.accumulated_weight.item() == 3.0


@pytest.mark.parametrize("masked", [math.nan, math.inf])
def test_what_has_no_weight_does_no_harm(masked):
    metric = WeightedMeanMetric()
    metric.update(torch.tensor([masked, 2.0]), torch.tensor([0.0, 4.0]))
    assert metric.compute().item() == 2.0


@pytest.mark.parametrize("no_data", [math.nan, -1.0])
def test_no_weight_at_all_is_no_data(no_data):
    metric = WeightedMeanMetric(no_data=no_data)
    assert metric.compute().item() == pytest.approx(no_data, nan_ok=True)
    metric.update(torch.tensor([5.0, 6.0]), torch.zeros(2))
    assert metric.compute().item() == pytest.approx(no_data, nan_ok=True)
    metric.update(2.0, 1.0)
    assert metric.compute().item() == 2.0


@pytest.mark.world_size(2)
def test_update_sync_compute_twice():
    context = DeviceMeshParameters(data_parallel_replicate=2).build()
    metric, total = WeightedMeanMetric(), SumMetric()
    for observations in ([(1.0, 1.0), (4.0, 2.0)], [(7.0, 3.0), (2.0, 2.0)]):
        value, weight = observations[context.rank]
        metric.update(torch.tensor(value), torch.tensor(weight))
        total.update(weight)
        metric.sync(context)
        total.sync(context)
        seen = metric.compute().item(), total.compute().item()
        # Rank 0 alone first: 1*1 + 4*2 over 3; then all four observations.
        expected = (3.0, 3.0) if observations[0][0] == 1.0 else (34 / 8, 8.0)
        assert seen == pytest.approx(expected)


@pytest.mark.world_size(2)
def test_a_rank_without_observations_takes_no_part_in_the_mean():
    context = DeviceMeshParameters(pipeline_parallel=2).build()
    metric = WeightedMeanMetric()
    if context.rank == 1:
        metric.update(torch.tensor([2.0, 4.0]), torch.tensor([1.0, 3.0]))
    metric.sync(context)
    assert metric.compute().item() == 3.5


@pytest.mark.world_size(2)
def test_tensor_parallel_peers_count_once():
    context = DeviceMeshParameters(tensor_parallel=2).build()
    mean, tokens = WeightedMeanMetric(), SumMetric()
    mean.update(torch.tensor(2.0), torch.tensor(5.0))
    tokens.update(5)
    for metric in (mean, tokens):
        metric.sync(context)
    assert (mean.compute().item(), mean.accumulated_weight.item(), tokens.compute().item()) == (2.0, 5.0, 5.0)


def test_state_resumes():
    metric = WeightedMeanMetric()
    metric.update(1.0, 1.0)
    resumed = WeightedMeanMetric()
    resumed.load_state_dict(metric.state_dict())
    resumed.update(4.0, 2.0)
    assert resumed.compute().item() == 3.0
    total = SumMetric()
    total.load_state_dict({"sum": {"value": torch.tensor(2.0)}})
    assert total.compute().item() == 2.0
