"""Wrapped metrics against the same metric that sees all samples in one process."""

import pytest
import torch
import torchmetrics
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryAveragePrecision, BinaryF1Score
from torchmetrics.regression import PearsonCorrCoef
from torchmetrics.wrappers import MinMaxMetric

from d9d.core.dist_context import DeviceMeshParameters
from d9d.metric.impl.container import ComposeMetric
from d9d.metric.impl.torchmetrics import TorchMetricsMetric


def samples(num_samples=21):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(num_samples, generator=generator)
    return scores, (torch.rand(num_samples, generator=generator) < scores).long()


def two_ranks():
    return DeviceMeshParameters(data_parallel_replicate=2).build()


@pytest.mark.world_size(2)
def test_auroc_of_21_samples_on_two_ranks():
    context = two_ranks()
    scores, labels = samples()
    metric = TorchMetricsMetric(BinaryAUROC())
    metric.update(scores[context.rank :: 2], labels[context.rank :: 2])
    metric.sync(context)
    # The value of the public report, from all samples in one process.
    assert metric.compute().item() == pytest.approx(0.772727, abs=1e-6)


@pytest.mark.world_size(2, timeout_s=10)
@pytest.mark.parametrize("num_updates", [(2, 1), (2, 0), (0, 3), (0, 0)])
def test_ranks_with_different_numbers_of_updates(num_updates):
    context = two_ranks()
    metric = TorchMetricsMetric(torchmetrics.CatMetric())
    for index in range(num_updates[context.rank]):
        metric.update(torch.full((index + 1,), float(10 * context.rank + index)))
    metric.sync(context)
    expected = [
        float(10 * rank + index) for rank in range(2) for index in range(num_updates[rank]) for _ in range(index + 1)
    ]
    result = metric.compute()
    assert (result.reshape(-1).tolist() if isinstance(result, torch.Tensor) else result) == expected


@pytest.mark.world_size(2, timeout_s=10)
@pytest.mark.parametrize("num_updates", [(2, 1), (2, 0)])
def test_lists_without_a_reduction(num_updates):
    class Sizes(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("sizes", default=[], dist_reduce_fx=None)

        def update(self, value):
            self.sizes.append(value)

        def compute(self):
            return [tuple(value.shape) for value in self.sizes]

    context = two_ranks()
    metric = TorchMetricsMetric(Sizes())
    for index in range(num_updates[context.rank]):
        metric.update(torch.zeros(context.rank + 1, index))
    metric.sync(context)
    assert metric.compute() == [(rank + 1, index) for rank in range(2) for index in range(num_updates[rank])]


@pytest.mark.world_size(2)
def test_the_local_state_is_left_alone():
    context = two_ranks()
    metric = TorchMetricsMetric(torchmetrics.SumMetric())
    for expected in (3.0, 6.0):
        metric.update(1.0 + context.rank)
        for _ in range(2):
            metric.sync(context)
            assert metric.compute().item() == expected
        assert metric.wrapped.metric_state["sum_value"].item() == expected / 3 * (1 + context.rank)
    metric.update(10.0)
    assert metric.compute().item() == 2.0 * (1 + context.rank) + 10.0


@pytest.mark.world_size(2)
def test_tensor_parallel_peers_count_once():
    context = DeviceMeshParameters(tensor_parallel=2).build()
    metric = ComposeMetric({"tokens": TorchMetricsMetric(torchmetrics.SumMetric())})
    metric.update(5.0)
    metric.sync(context)
    assert metric.compute()["tokens"].item() == 5.0


@pytest.mark.world_size(2)
def test_a_collection_with_shared_states():
    context = two_ranks()
    scores, labels = samples(31)

    def build():
        return torchmetrics.MetricCollection(
            {
                "auroc": BinaryAUROC(),
                "average_precision": BinaryAveragePrecision(),
                "accuracy": BinaryAccuracy(),
                "f1": BinaryF1Score(),
            }
        )

    metric, whole = TorchMetricsMetric(build()), build()
    part = slice(0, 20) if context.rank == 0 else slice(20, 31)
    for _ in range(2):
        metric.update(scores[part], labels[part])
        whole.update(scores, labels)
        metric.sync(context)
        expected = whole.compute()
        actual = metric.compute()
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("empty_rank", [None, 0])
def test_stacked_states_and_wrappers(empty_rank):
    context = two_ranks()
    generator = torch.Generator().manual_seed(3)
    preds, targets = torch.rand(20, generator=generator), torch.rand(20, generator=generator)
    metric = TorchMetricsMetric(PearsonCorrCoef())
    wrapper = TorchMetricsMetric(MinMaxMetric(torchmetrics.MeanMetric()))
    whole = PearsonCorrCoef()
    if context.rank != empty_rank:
        part = slice(context.rank * 7, 7 + context.rank * 13)
        metric.update(preds[part], targets[part])
        wrapper.update(preds[part])
    seen = slice(0, 20) if empty_rank is None else slice(7, 20)
    whole.update(preds[seen], targets[seen])
    metric.sync(context)
    wrapper.sync(context)
    torch.testing.assert_close(metric.compute(), whole.compute())
    torch.testing.assert_close(wrapper.compute()["raw"], preds[seen].mean())


@pytest.mark.world_size(2)
def test_different_metrics_are_refused_on_all_ranks():
    context = two_ranks()
    metric = TorchMetricsMetric([torchmetrics.SumMetric, torchmetrics.MaxMetric][context.rank]())
    metric.update(1.0)
    with pytest.raises(ValueError, match=r"sum_value.*max_value"):
        metric.sync(context)


def test_without_ranks_it_is_the_wrapped_metric():
    scores, labels = samples()
    metric, plain = TorchMetricsMetric(BinaryAUROC()), BinaryAUROC()
    for part in (slice(0, 10), slice(10, 21)):
        metric.update(scores[part], labels[part])
        plain.update(scores[part], labels[part])
        metric.sync(DeviceMeshParameters().build())
        assert metric.compute().item() == plain.compute().item()


def test_state_resumes_with_lists_and_counts():
    scores, labels = samples()
    metric = TorchMetricsMetric(BinaryAUROC())
    metric.update(scores[:5], labels[:5])
    metric.update(scores[5:10], labels[5:10])
    resumed = TorchMetricsMetric(BinaryAUROC())
    resumed.load_state_dict(metric.state_dict())
    resumed.update(scores[10:], labels[10:])
    assert resumed.compute().item() == pytest.approx(0.772727, abs=1e-6)
    assert resumed.wrapped.update_count == 3
    resumed.reset()
    resumed.update(torch.tensor([0.1, 0.9]), torch.tensor([0, 1]))
    assert resumed.compute().item() == 1.0
