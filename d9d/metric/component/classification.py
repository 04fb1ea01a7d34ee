"""Confusion matrices, what is computed from them, and how predictions get into them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, assert_never

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.functional import one_hot

from d9d.core.device import accumulator_dtype
from d9d.metric.component.accumulator import MetricAccumulator, sync_accumulators

if TYPE_CHECKING:
    from d9d.core.dist_context import DistributedContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfusionMatrix:
    """Counts of each output against all others. Shapes: (num_outputs,), or () when summed over outputs."""

    tp: torch.Tensor
    """Predicted and true."""
    fp: torch.Tensor
    """Predicted, but not true."""
    tn: torch.Tensor
    """Neither predicted nor true."""
    fn: torch.Tensor
    """True, but not predicted."""


class ConfusionMatrixAccumulator(Stateful):
    """Counts, for each output, predictions that agree and disagree with the targets."""

    def __init__(self, num_outputs: int) -> None:
        """Start with no counts.

        Args:
            num_outputs: Number of classes or labels; 1 for a yes-no question.

        Raises:
            ValueError: If there is none.
        """
        if num_outputs < 1:
            raise ValueError(f"num_outputs ({num_outputs}) must be at least 1.")
        self._num_outputs = num_outputs
        # Rows: tp, fp, tn, fn.
        self._counts = MetricAccumulator(torch.zeros(4, num_outputs, dtype=torch.int64))

    @property
    def state(self) -> ConfusionMatrix:
        """The counts of all ranks as of the last `sync`, or of this rank if it has been updated since."""
        tp, fp, tn, fn = self._counts.value.unbind(0)
        return ConfusionMatrix(tp=tp, fp=fp, tn=tn, fn=fn)

    def accumulators(self) -> Sequence[MetricAccumulator]:
        """Return what `sync` reduces."""
        return (self._counts,)

    def update(self, preds: torch.Tensor, targets: torch.Tensor) -> None:
        """Count observations of this rank.

        Args:
            preds: What is predicted, as bool or 0 and 1. Shapes: (..., num_outputs), or (...) for one output.
            targets: What is true, of the same shape.

        Raises:
            ValueError: If the shapes do not fit.
        """
        if preds.shape != targets.shape:
            raise ValueError(f"preds {tuple(preds.shape)} and targets {tuple(targets.shape)} must have one shape.")
        if self._num_outputs > 1 and (preds.ndim == 0 or preds.shape[-1] != self._num_outputs):
            raise ValueError(f"the last dimension of preds {tuple(preds.shape)} must be {self._num_outputs} outputs.")
        predicted = preds.detach().reshape(-1, self._num_outputs).bool()  # (N, num_outputs)
        true = targets.detach().reshape(-1, self._num_outputs).bool()  # (N, num_outputs)
        self._counts.update(
            torch.stack(
                [
                    (predicted & true).sum(0),
                    (predicted & ~true).sum(0),
                    (~predicted & ~true).sum(0),
                    (~predicted & true).sum(0),
                ]
            )
        )

    def sync(self, dist_context: "DistributedContext | None" = None) -> None:
        """Sum a copy of the counts over ranks, as `MetricAccumulator.sync` does. All ranks must call it."""
        if dist_context is None:
            self._counts.sync()
        else:
            sync_accumulators(self.accumulators(), dist_context.data_group)

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


class ConfusionMatrixStatistic(Protocol):
    """Computes a number for each output from its counts. Without any observation it is 0, never NaN."""

    def __call__(self, matrix: ConfusionMatrix) -> torch.Tensor:
        """Return the statistic. Shapes: that of the counts."""
        ...


class AccuracyStatistic(ConfusionMatrixStatistic):
    """``(tp + tn) / (tp + fp + tn + fn)``: the share of yes-no questions with the right answer."""

    def __call__(self, matrix: ConfusionMatrix) -> torch.Tensor:
        """Return the accuracy of each output."""
        return _ratio(matrix.tp + matrix.tn, matrix.tp + matrix.fp + matrix.tn + matrix.fn)


class PrecisionStatistic(ConfusionMatrixStatistic):
    """``tp / (tp + fp)``."""

    def __call__(self, matrix: ConfusionMatrix) -> torch.Tensor:
        """Return the precision of each output."""
        return _ratio(matrix.tp, matrix.tp + matrix.fp)


class RecallStatistic(ConfusionMatrixStatistic):
    """``tp / (tp + fn)``; for exclusive classes this is also the accuracy within each class."""

    def __call__(self, matrix: ConfusionMatrix) -> torch.Tensor:
        """Return the recall of each output."""
        return _ratio(matrix.tp, matrix.tp + matrix.fn)


class FBetaStatistic(ConfusionMatrixStatistic):
    """``(1 + b^2) tp / ((1 + b^2) tp + b^2 fn + fp)``, where recall counts ``b`` times as much as precision."""

    def __init__(self, beta: float) -> None:
        """Weigh recall against precision.

        Raises:
            ValueError: If beta is not positive.
        """
        if not beta > 0:
            raise ValueError(f"beta ({beta}) must be positive; 1 weighs precision and recall alike.")
        self._beta_squared = beta * beta

    def __call__(self, matrix: ConfusionMatrix) -> torch.Tensor:
        """Return the F-beta score of each output."""
        weighted_tp = (1 + self._beta_squared) * matrix.tp
        return _ratio(weighted_tp, weighted_tp + self._beta_squared * matrix.fn + matrix.fp)


class ClassificationAggregationMethod(StrEnum):
    """How the outputs become one number."""

    MICRO = "micro"
    """The statistic of the counts summed over outputs."""
    MACRO = "macro"
    """The mean of the statistics of the outputs."""
    WEIGHTED = "weighted"
    """The mean weighted by how often each output is true."""
    NONE = "none"
    """One number per output."""


class ConfusionMatrixAggregator:
    """Computes a statistic over all outputs."""

    def __init__(
        self,
        method: ClassificationAggregationMethod,
        statistic: ConfusionMatrixStatistic,
        *,
        skip_absent: bool = False,
    ) -> None:
        """Choose the computation.

        Args:
            method: How the outputs become one number.
            statistic: What is computed.
            skip_absent: Whether the macro mean leaves out outputs that were neither predicted nor true, as is usual
                for exclusive classes; otherwise they count as 0.
        """
        self._method = method
        self._statistic = statistic
        self._skip_absent = skip_absent

    def __call__(self, matrix: ConfusionMatrix) -> torch.Tensor:
        """Return the number. Shapes: (), or (num_outputs,) for ``NONE``."""
        match self._method:
            case ClassificationAggregationMethod.MICRO:
                summed = ConfusionMatrix(tp=matrix.tp.sum(), fp=matrix.fp.sum(), tn=matrix.tn.sum(), fn=matrix.fn.sum())
                return self._statistic(summed)
            case ClassificationAggregationMethod.MACRO:
                present = (matrix.tp + matrix.fp + matrix.fn) > 0
                weights = present if self._skip_absent else torch.ones_like(present)
                return self._mean(matrix, weights)
            case ClassificationAggregationMethod.WEIGHTED:
                return self._mean(matrix, matrix.tp + matrix.fn)
            case ClassificationAggregationMethod.NONE:
                return self._statistic(matrix)
            case _:
                assert_never(self._method)

    def _mean(self, matrix: ConfusionMatrix, weights: torch.Tensor) -> torch.Tensor:
        return _ratio((self._statistic(matrix) * weights).sum(), weights.sum())


class ClassificationPredictionsProcessor(Protocol):
    """Turns what a model predicts, and the targets, into yes-no answers per output."""

    def __call__(self, preds: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return predictions and targets as bool, as `ConfusionMatrixAccumulator.update` takes them."""
        ...


class ThresholdProcessor(ClassificationPredictionsProcessor):
    """Predicts an output when its score is above a threshold."""

    def __init__(self, threshold: float) -> None:
        """Choose the threshold."""
        self._threshold = threshold

    def __call__(self, preds: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the answers. Shapes: (...) each, as given."""
        return preds > self._threshold, targets.bool()


class OneHotProcessor(ClassificationPredictionsProcessor):
    """Predicts one of several exclusive classes."""

    def __init__(self, num_classes: int) -> None:
        """Choose the number of classes."""
        self._num_classes = num_classes

    def __call__(self, preds: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the answers per class.

        Args:
            preds: Class indices, or scores whose highest wins. Shapes: (...) as integers, (..., num_classes) as floats.
            targets: Class indices. Shapes: (...).
        """
        indices = preds.argmax(-1) if preds.is_floating_point() else preds
        return (
            one_hot(indices.long(), self._num_classes).bool(),  # (..., num_classes)
            one_hot(targets.long(), self._num_classes).bool(),  # (..., num_classes)
        )


class TopKProcessor(ClassificationPredictionsProcessor):
    """Predicts the ``k`` classes with the highest scores at once."""

    def __init__(self, k: int) -> None:
        """Choose the number of classes that are predicted.

        Raises:
            ValueError: If there is none.
        """
        if k < 1:
            raise ValueError(f"k ({k}) must be at least 1.")
        self._k = k

    def __call__(self, preds: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the answers per class.

        Args:
            preds: Scores. Shapes: (..., num_classes).
            targets: Class indices. Shapes: (...).
        """
        num_classes = preds.shape[-1]
        highest = preds.topk(min(self._k, num_classes), dim=-1).indices  # (..., k)
        predicted = torch.zeros_like(preds, dtype=torch.bool).scatter_(-1, highest, True)  # (..., num_classes)
        return predicted, one_hot(targets.long(), num_classes).bool()


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Divide, where 0 / 0 is 0."""
    dtype = accumulator_dtype(numerator.device)
    quotient = numerator.to(dtype) / denominator.to(dtype)
    return torch.where(denominator == 0, torch.zeros_like(quotient), quotient)
