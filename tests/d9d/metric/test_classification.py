"""Against torchmetrics and scikit-learn, and by hand where they have no answer."""

import pytest
import torch
import torchmetrics.functional.classification as reference
from sklearn.metrics import roc_auc_score

from d9d.core.dist_context import DeviceMeshParameters
from d9d.metric.component.classification import (
    AccuracyStatistic,
    ClassificationAggregationMethod,
    ConfusionMatrix,
    ConfusionMatrixAccumulator,
    ConfusionMatrixAggregator,
    FBetaStatistic,
    PrecisionStatistic,
    RecallStatistic,
)
from d9d.metric.impl.classification import BinaryAUROCMetric, confusion_matrix_metric

NUM_CLASSES = 5
STATISTICS = {
    "accuracy": lambda builder: builder.with_accuracy(),
    "precision": lambda builder: builder.with_precision(),
    "recall": lambda builder: builder.with_recall(),
    "f1_score": lambda builder: builder.with_f1(),
}
AGGREGATIONS = {
    "micro": lambda builder: builder.micro(),
    "macro": lambda builder: builder.macro(),
    "weighted": lambda builder: builder.weighted(),
    "none": lambda builder: builder.per_class(),
}


def compute(builder, *batches):
    metric = builder.build()
    for preds, targets in batches:
        metric.update(preds, targets)
    return metric.compute()


def assert_close(actual, expected):
    # The references compute in float32.
    torch.testing.assert_close(actual.float(), expected.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_multiclass(statistic, aggregation):
    # Class 4 neither occurs nor is predicted: the macro mean is over the other four.
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(40, NUM_CLASSES, generator=generator)
    scores[:, 4] = -1.0
    targets = torch.randint(0, 4, (40,), generator=generator)
    builder = AGGREGATIONS[aggregation](STATISTICS[statistic](confusion_matrix_metric().multiclass(NUM_CLASSES)))
    actual = compute(builder, (scores[:7], targets[:7]), (scores[7:], targets[7:]))
    function = getattr(reference, f"multiclass_{statistic}")
    assert_close(actual, function(scores, targets, NUM_CLASSES, average=aggregation))
    assert_close(compute(builder, (scores.argmax(-1), targets)), actual)


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_multilabel(statistic, aggregation):
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(6, 5, NUM_CLASSES, generator=generator)
    targets = torch.randint(0, 2, (6, 5, NUM_CLASSES), generator=generator)
    builder = AGGREGATIONS[aggregation](STATISTICS[statistic](confusion_matrix_metric().multilabel(NUM_CLASSES, 0.3)))
    function = getattr(reference, f"multilabel_{statistic}")
    flat = scores.reshape(-1, NUM_CLASSES), targets.reshape(-1, NUM_CLASSES)
    assert_close(compute(builder, (scores, targets)), function(*flat, NUM_CLASSES, average=aggregation, threshold=0.3))


@pytest.mark.parametrize("statistic", STATISTICS)
def test_binary(statistic):
    generator = torch.Generator().manual_seed(3)
    scores, targets = torch.rand(50, generator=generator), torch.randint(0, 2, (50,), generator=generator)
    builder = STATISTICS[statistic](confusion_matrix_metric().binary(threshold=0.4))
    function = getattr(reference, f"binary_{statistic}")
    assert_close(compute(builder, (scores, targets)), function(scores, targets, threshold=0.4))


@pytest.mark.parametrize("beta", [0.5, 2.0])
def test_fbeta(beta):
    generator = torch.Generator().manual_seed(4)
    scores, targets = torch.rand(50, generator=generator), torch.randint(0, 2, (50,), generator=generator)
    actual = compute(confusion_matrix_metric().binary().with_fbeta(beta), (scores, targets))
    assert_close(actual, reference.binary_fbeta_score(scores, targets, beta))


def test_top_k_predicts_k_classes_at_once():
    scores = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]])
    targets = torch.tensor([1, 0, 0])
    builder = confusion_matrix_metric().multiclass(3, top_k=2)
    # The target is among the two best of samples 0 and 2; six classes are predicted in all.
    assert compute(builder.with_accuracy(), (scores, targets)).item() == pytest.approx(2 / 3)
    assert compute(builder.with_precision(), (scores, targets)).item() == pytest.approx(2 / 6)


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_without_observations_it_is_zero(statistic, aggregation):
    builder = AGGREGATIONS[aggregation](STATISTICS[statistic](confusion_matrix_metric().multiclass(3)))
    assert builder.build().compute().sum().item() == 0.0


def test_statistics_by_hand():
    matrix = ConfusionMatrix(tp=torch.tensor(6), fp=torch.tensor(2), tn=torch.tensor(9), fn=torch.tensor(3))
    assert AccuracyStatistic()(matrix).item() == pytest.approx(15 / 20)
    assert PrecisionStatistic()(matrix).item() == pytest.approx(6 / 8)
    assert RecallStatistic()(matrix).item() == pytest.approx(6 / 9)
    assert FBetaStatistic(2.0)(matrix).item() == pytest.approx(5 * 6 / (5 * 6 + 4 * 3 + 2))


def test_macro_of_labels_counts_absent_ones_as_zero_unless_told():
    counts = ConfusionMatrix(
        tp=torch.tensor([1, 0]), fp=torch.tensor([0, 0]), tn=torch.tensor([1, 2]), fn=torch.tensor([0, 0])
    )
    macro = ClassificationAggregationMethod.MACRO
    assert ConfusionMatrixAggregator(macro, RecallStatistic())(counts).item() == 0.5
    assert ConfusionMatrixAggregator(macro, RecallStatistic(), skip_absent=True)(counts).item() == 1.0


def test_builder_and_shapes_refuse_mistakes():
    with pytest.raises(ValueError, match="no task is chosen"):
        confusion_matrix_metric().with_f1().build()
    with pytest.raises(ValueError, match="no statistic is chosen"):
        confusion_matrix_metric().binary().build()
    with pytest.raises(ValueError, match=r"last dimension of preds \(4, 2\) must be 3"):
        ConfusionMatrixAccumulator(3).update(torch.zeros(4, 2), torch.zeros(4, 2))
    with pytest.raises(ValueError, match="one shape"):
        ConfusionMatrixAccumulator(1).update(torch.zeros(4), torch.zeros(3))


@pytest.mark.world_size(2)
def test_counts_of_uneven_ranks_are_summed():
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand(21, NUM_CLASSES, generator=generator)
    targets = torch.randint(0, NUM_CLASSES, (21,), generator=generator)
    metric = confusion_matrix_metric().multiclass(NUM_CLASSES).with_f1().macro().build()
    metric.update(scores[context.rank :: 2], targets[context.rank :: 2])
    for _ in range(2):
        metric.sync(context)
    assert_close(metric.compute(), reference.multiclass_f1_score(scores, targets, NUM_CLASSES, average="macro"))


def test_auroc_of_scores_on_a_grid_is_exact():
    generator = torch.Generator().manual_seed(6)
    scores = torch.randint(0, 20, (200,), generator=generator) / 20 + 0.025
    labels = torch.rand(200, generator=generator) < scores
    metric = BinaryAUROCMetric(num_bins=20)
    metric.update(scores[:50], labels[:50])
    metric.update(scores[50:].view(3, 50), labels[50:].view(3, 50).long())
    assert metric.compute().item() == pytest.approx(roc_auc_score(labels.numpy(), scores.numpy()), abs=1e-12)


@pytest.mark.world_size(2)
def test_auroc_of_21_samples_on_two_ranks():
    context = DeviceMeshParameters(data_parallel_replicate=2).build()
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(21, generator=generator)
    labels = torch.rand(21, generator=generator) < scores
    metric = BinaryAUROCMetric()
    metric.update(scores[context.rank :: 2], labels[context.rank :: 2])
    metric.sync(context)
    assert metric.compute().item() == pytest.approx(roc_auc_score(labels.numpy(), scores.numpy()), abs=1e-12)


def test_auroc_of_one_kind_is_no_data_and_scores_outside_are_clamped():
    metric = BinaryAUROCMetric(num_bins=10)
    assert metric.compute().isnan()
    metric.update(torch.tensor([1.0, 7.0]), torch.tensor([1, 1]))
    assert metric.compute().isnan()
    metric.update(torch.tensor([-3.0, 0.0]), torch.tensor([0, 0]))
    assert metric.compute().item() == 1.0


def test_states_resume():
    first = confusion_matrix_metric().binary().with_recall().build()
    first.update(torch.tensor([0.9, 0.1]), torch.tensor([1, 1]))
    second = confusion_matrix_metric().binary().with_recall().build()
    second.load_state_dict(first.state_dict())
    second.update(torch.tensor([0.9, 0.9]), torch.tensor([1, 1]))
    assert second.compute().item() == 0.75
