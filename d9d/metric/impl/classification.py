"""Metrics of classifiers."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import torch

from d9d.core.device import accumulator_dtype
from d9d.metric.base import Metric
from d9d.metric.component import MetricAccumulator, sync_accumulators
from d9d.metric.component.classification import (
    AccuracyStatistic,
    ClassificationAggregationMethod,
    ClassificationPredictionsProcessor,
    ConfusionMatrixAccumulator,
    ConfusionMatrixAggregator,
    ConfusionMatrixStatistic,
    FBetaStatistic,
    OneHotProcessor,
    PrecisionStatistic,
    RecallStatistic,
    ThresholdProcessor,
    TopKProcessor,
)

if TYPE_CHECKING:
    from d9d.core.dist_context import DistributedContext


class ConfusionMatrixMetric(Metric[torch.Tensor]):
    """A statistic of a confusion matrix. Built by `confusion_matrix_metric`."""

    def __init__(
        self,
        processor: ClassificationPredictionsProcessor,
        aggregator: ConfusionMatrixAggregator,
        num_outputs: int,
    ) -> None:
        """Start without observations.

        Args:
            processor: Turns predictions into yes-no answers per output.
            aggregator: Computes the result.
            num_outputs: Number of classes or labels; 1 for a yes-no question.
        """
        self._processor = processor
        self._aggregator = aggregator
        self._matrix = ConfusionMatrixAccumulator(num_outputs)

    def accumulators(self) -> Sequence[MetricAccumulator]:
        """Return what `sync` reduces."""
        return self._matrix.accumulators()

    def update(self, preds: torch.Tensor, targets: torch.Tensor) -> None:
        """Count predictions.

        Args:
            preds: Scores. Shapes: (...) binary, (..., num_classes) otherwise; multiclass also takes class indices of
                shape (...).
            targets: Shapes: (...) binary (0 or 1) and multiclass (class indices), (..., num_classes) multilabel.
        """
        self._matrix.update(*self._processor(preds, targets))

    def sync(self, dist_context: "DistributedContext") -> None:
        """Sum copies of the counts over ``dist_context.data_group``. All ranks must call it."""
        self._matrix.sync(dist_context)

    def compute(self) -> torch.Tensor:
        """Return the statistic, 0 if there were no observations. Shapes: (), or (num_outputs,) per class."""
        return self._aggregator(self._matrix.state)

    def reset(self) -> None:
        """Forget all counts."""
        self._matrix.reset()

    def to(self, device: str | torch.device | int) -> None:
        """Move the counts to a device."""
        self._matrix.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of this rank."""
        return self._matrix.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from counts of this rank."""
        self._matrix.load_state_dict(state_dict)


class ConfusionMatrixMetricBuilder:
    """Collects the parts of a `ConfusionMatrixMetric`: a task, a statistic and an aggregation (micro if not chosen)."""

    def __init__(self) -> None:
        """Start with nothing chosen."""
        self._processor: ClassificationPredictionsProcessor | None = None
        self._num_outputs = 0
        self._is_multiclass = False
        self._statistic: ConfusionMatrixStatistic | None = None
        self._method = ClassificationAggregationMethod.MICRO

    def binary(self, threshold: float = 0.5) -> Self:
        """Answer one yes-no question: yes above the threshold."""
        return self._set_task(ThresholdProcessor(threshold), num_outputs=1, is_multiclass=False)

    def multiclass(self, num_classes: int, top_k: int | None = None) -> Self:
        """Choose one of several exclusive classes.

        Args:
            num_classes: Number of classes.
            top_k: None predicts the class with the highest score. A number predicts that many classes at once: each of
                them that is not the target is a false positive.
        """
        processor = OneHotProcessor(num_classes) if top_k is None else TopKProcessor(top_k)
        return self._set_task(processor, num_outputs=num_classes, is_multiclass=True)

    def multilabel(self, num_classes: int, threshold: float = 0.5) -> Self:
        """Answer several independent yes-no questions: yes above the threshold."""
        return self._set_task(ThresholdProcessor(threshold), num_outputs=num_classes, is_multiclass=False)

    def _set_task(
        self, processor: ClassificationPredictionsProcessor, *, num_outputs: int, is_multiclass: bool
    ) -> Self:
        self._processor = processor
        self._num_outputs = num_outputs
        self._is_multiclass = is_multiclass
        return self

    def with_accuracy(self) -> Self:
        """Compute the share of right answers.

        For a multiclass task an answer is the class of a sample: the share within each class is its recall, and the
        micro aggregation is the share of all samples. Not choosing a class is no right answer there.
        """
        return self.with_statistic(AccuracyStatistic())

    def with_f1(self) -> Self:
        """Compute the harmonic mean of precision and recall."""
        return self.with_fbeta(1.0)

    def with_fbeta(self, beta: float) -> Self:
        """Compute the F-beta score, where recall counts ``beta`` times as much as precision."""
        return self.with_statistic(FBetaStatistic(beta))

    def with_precision(self) -> Self:
        """Compute the precision."""
        return self.with_statistic(PrecisionStatistic())

    def with_recall(self) -> Self:
        """Compute the recall."""
        return self.with_statistic(RecallStatistic())

    def with_statistic(self, statistic: ConfusionMatrixStatistic) -> Self:
        """Compute a statistic."""
        self._statistic = statistic
        return self

    def with_aggregation(self, method: ClassificationAggregationMethod) -> Self:
        """Choose how the outputs become one number."""
        self._method = method
        return self

    def micro(self) -> Self:
        """Sum the counts of all outputs first."""
        return self.with_aggregation(ClassificationAggregationMethod.MICRO)

    def macro(self) -> Self:
        """Take the mean over outputs; exclusive classes that were neither predicted nor true are left out."""
        return self.with_aggregation(ClassificationAggregationMethod.MACRO)

    def weighted(self) -> Self:
        """Take the mean over outputs, weighted by how often each is true."""
        return self.with_aggregation(ClassificationAggregationMethod.WEIGHTED)

    def per_class(self) -> Self:
        """Return one number per output."""
        return self.with_aggregation(ClassificationAggregationMethod.NONE)

    def build(self) -> ConfusionMatrixMetric:
        """Build the metric.

        Raises:
            ValueError: If no task or no statistic is chosen.
        """
        if self._processor is None:
            raise ValueError("no task is chosen: call binary(), multiclass(...) or multilabel(...) before build().")
        if self._statistic is None:
            raise ValueError("no statistic is chosen: call with_accuracy(), with_f1(), ... before build().")
        statistic = self._statistic
        if self._is_multiclass and isinstance(statistic, AccuracyStatistic):
            statistic = RecallStatistic()
        aggregator = ConfusionMatrixAggregator(self._method, statistic, skip_absent=self._is_multiclass)
        return ConfusionMatrixMetric(self._processor, aggregator, self._num_outputs)


def confusion_matrix_metric() -> ConfusionMatrixMetricBuilder:
    """Start the choice of a metric: ``confusion_matrix_metric().multiclass(10).with_f1().macro().build()``."""
    return ConfusionMatrixMetricBuilder()


class BinaryAUROCMetric(Metric[torch.Tensor]):
    """The area under the ROC curve, from a histogram of scores.

    Its state has a fixed size. Scores in one bin count as ties, so the value is exact when no bin holds both a positive
    and a negative of different scores.
    """

    def __init__(self, num_bins: int = 10000) -> None:
        """Start without observations.

        Args:
            num_bins: Number of equal bins between 0 and 1.

        Raises:
            ValueError: If there is none.
        """
        if num_bins < 1:
            raise ValueError(f"num_bins ({num_bins}) must be at least 1.")
        self._num_bins = num_bins
        # Row 0: negatives, row 1: positives.
        self._counts = MetricAccumulator(torch.zeros(2, num_bins, dtype=torch.int64))

    def accumulators(self) -> Sequence[MetricAccumulator]:
        """Return what `sync` reduces."""
        return (self._counts,)

    def update(self, probs: torch.Tensor, labels: torch.Tensor) -> None:
        """Count scores.

        Args:
            probs: Scores from 0 to 1; others, NaN among them, go to the nearest bin or to the lowest. Shapes: (...).
            labels: 1 or True for positives, of the same shape.

        Raises:
            ValueError: If the shapes differ.
        """
        if probs.shape != labels.shape:
            raise ValueError(f"probs {tuple(probs.shape)} and labels {tuple(labels.shape)} must have one shape.")
        # Low-precision scores times the number of bins would be rounded to a wrong bin.
        scaled = probs.detach().reshape(-1).float().nan_to_num(0.0, posinf=1.0, neginf=0.0) * self._num_bins
        bins = scaled.clamp(0, self._num_bins - 1).long()
        index = labels.detach().reshape(-1).bool().long() * self._num_bins + bins
        counts = torch.zeros(2 * self._num_bins, dtype=torch.int64, device=index.device)
        counts.index_add_(0, index, torch.ones_like(index))
        self._counts.update(counts.view(2, self._num_bins))

    def sync(self, dist_context: "DistributedContext") -> None:
        """Sum copies of the counts over ``dist_context.data_group``. All ranks must call it."""
        sync_accumulators(self.accumulators(), dist_context.data_group)

    def compute(self) -> torch.Tensor:
        """Return the area; NaN if there were no positives or no negatives. Shapes: ().

        It is the chance that a positive scores higher than a negative, where ties count half.
        """
        counts = self._counts.value
        negatives, positives = counts.to(accumulator_dtype(counts.device)).unbind(0)
        negatives_below = negatives.cumsum(0) - negatives
        wins = (positives * (negatives_below + negatives / 2)).sum()
        pairs = positives.sum() * negatives.sum()
        return (wins / pairs).where(pairs > 0, math.nan)

    def reset(self) -> None:
        """Forget all counts."""
        self._counts.reset()

    def to(self, device: str | torch.device | int) -> None:
        """Move the counts to a device."""
        self._counts.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of this rank."""
        return {"counts": self._counts.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from counts of this rank."""
        self._counts.load_state_dict(state_dict["counts"])
