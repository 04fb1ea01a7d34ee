"""Finds out that ranks log different keys, before one of them waits for the others, or adds up what does not belong together.

[Note: who logs what]
``self.log(..., sync_dist=True)`` is a collective, of a single number without its name. So with the first batch of each kind of
loop, and with the first end of its epoch, ranks tell each other which keys they have logged so far: before each number that is
reduced, when the step has run, and when the hooks behind it have. They do all by the same exchange: a rank that reduces meets one
that is through, and both know. Afterwards it costs nothing.

What batches have logged is complete when an epoch ends, and all ranks reduce it then. What the hooks at the end log is reduced when
somebody reads it, and a progress bar reads on rank 0 alone. So of these each is compared by itself, with those before it.
"""
# Lightning keeps what was logged to itself
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Hashable

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _METRICS, _ResultCollection, _ResultMetric
from torchmetrics import Metric

from d9d.core.agreement import agree_on, name_of
from d9d.core.participants import Participants
from d9d_lightning.metrics.install import is_gathered, results_of

__all__ = ["LogAgreement"]

_MEND = (
    "Call self.log with sync_dist=True, or with a metric, for the same keys in the same order on all ranks: with 0 or NaN where "
    "a rank has no value. What one rank alone shall log takes no sync_dist, and rank_zero_only=True."
)

_IN_A_VALUE = "in the middle of a value that is reduced"

_EPOCH_END = frozenset(("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end"))


class LogAgreement:
    """Compares keys that are reduced over the data-parallel ranks, in one run of a Trainer. See [Note: who logs what].

    Args:
        trainer: Runs the loops.
        group: Data-parallel ranks; all of them must make the same calls.
    """

    def __init__(self, trainer: Trainer, group: dist.ProcessGroup) -> None:
        self._trainer = trainer
        self._group = group
        self._participants = Participants([group])
        self._stepped: set[Hashable] = set()
        self._agreed: set[Hashable] = set()
        self._replaced: list[tuple[_ResultCollection, Callable[[bool], _METRICS]]] = []

    def install(self) -> None:
        """Compare when batches and epochs of the Trainer end, and before their values are reduced. No communication."""
        connector = self._trainer._logger_connector

        def end_batch() -> None:
            type(connector).on_batch_end(connector)
            self._end_batch()

        def end_epoch() -> None:
            type(connector).on_epoch_end(connector)
            self._end_epoch()

        vars(connector).update(on_batch_end=end_batch, on_epoch_end=end_epoch)
        for results in results_of(self._trainer):
            self._replaced.append((results, results.metrics))
            vars(results)["metrics"] = _ComparedMetrics(self._before_values, results)

    def release(self) -> None:
        """Leave the Trainer as it was."""
        attributes = vars(self._trainer._logger_connector)
        attributes.pop("on_batch_end", None)
        attributes.pop("on_epoch_end", None)
        for results, replaced in self._replaced:
            vars(results)["metrics"] = replaced
        self._replaced.clear()

    def before_reduction(self) -> None:
        """Compare what was logged, before a number of a batch is reduced. Blocks the host where it compares.

        Raises:
            ValueError: On all ranks, if they log different keys.
        """
        results = self._trainer._results
        # Between batches Lightning reduces more than logs, such as the lengths of loaders.
        is_batch = self._trainer._logger_connector._first_loop_iter is not None
        if results is not None and is_batch and not self._is_agreed(results):
            self._compare(results, _IN_A_VALUE)

    def before_backward(self) -> None:
        """Compare what a step has logged that runs backward passes by itself, and goes on to log. As `before_reduction`."""
        results = self._trainer._results
        if results is not None and not self._is_agreed(results):
            self._compare(results, "before a backward pass")

    def end_step(self) -> None:
        """Compare what a step has logged, with the first batch of a loop; then it blocks the host.

        Raises:
            ValueError: On all ranks, if they have logged different keys.
        """
        results = self._trainer._results
        if results is None or self._is_agreed(results) or self._loop(results) in self._stepped:
            return
        self._compare(results, "at the end of the step")
        self._stepped.add(self._loop(results))

    def _end_batch(self) -> None:
        """Compare what a batch has logged whose step was compared. It may wait for others of its accumulation window."""
        results = self._trainer._results
        if results is None or self._is_agreed(results) or self._loop(results) not in self._stepped:
            return
        self._compare(results, "at the end of the batch")
        self._agreed.add(self._loop(results))

    def _before_values(self, results: _ResultCollection) -> None:
        """Compare what is going to be reduced for the epoch, and reduce what hooks at its end have logged."""
        if self._trainer.state.stage in self._agreed:
            return
        pending = [
            (key, result)
            for key, result in results.valid_items()
            if result.meta.on_epoch and result._computed is None and _operation(result, self._group) is not None
        ]
        late = [(key, result) for key, result in pending if result.meta.fx in _EPOCH_END]
        if len(late) < len(pending):
            self._compare(results, _IN_A_VALUE)
        for key, result in late:
            self._compare(results, _IN_A_VALUE, last=key)
            results._get_cache(result, on_step=False)

    def _end_epoch(self) -> None:
        """Compare what was logged up to the end of the first epoch of a stage."""
        results, stage = self._trainer._results, self._trainer.state.stage
        if results is None or stage in self._agreed:
            return
        self._compare(results, "at the end of the epoch")
        self._agreed.add(stage)

    def _is_agreed(self, results: _ResultCollection) -> bool:
        return not self._agreed.isdisjoint((self._trainer.state.stage, self._loop(results)))

    def _loop(self, results: _ResultCollection) -> Hashable:
        """Return what stands for a loop over one loader."""
        stage = self._trainer.state.stage
        return stage, results.dataloader_idx

    def _compare(self, results: _ResultCollection, where: str, last: str | None = None) -> None:
        """Compare the keys that are reduced, up to one of them."""
        reduced = _reduced(results, self._group)
        if last is not None:
            names = list(reduced)
            reduced = {name: reduced[name] for name in names[: names.index(last) + 1]}
        facts: dict[str, object] = {"where the rank is": where, "keys": reduced, "order of the keys": list(reduced)}
        agree_on(self._participants, "what they log (here a rank is a data-parallel one)", facts, _MEND)


class _ComparedMetrics:
    """Stands for ``metrics`` of Lightning's results, which reduces the values of an epoch."""

    def __init__(self, before_values: Callable[[_ResultCollection], None], results: _ResultCollection) -> None:
        self._before_values = before_values
        self._results = results
        self._metrics = results.metrics

    def __call__(self, on_step: bool) -> _METRICS:
        if not on_step:
            self._before_values(self._results)
        return self._metrics(on_step)


def _reduced(results: _ResultCollection, group: dist.ProcessGroup) -> dict[str, str]:
    """Return how keys are reduced over a group that have been logged in this epoch, without those that are not."""
    return {key: text for key, result in results.items() if (text := _operation(result, group)) is not None}


def _operation(result: _ResultMetric, group: dist.ProcessGroup) -> str | None:
    meta = result.meta
    if result.has_reset:
        return None
    if not result.is_tensor:
        # Lightning computes it for the epoch alone, and takes no notice of rank_zero_only.
        is_exchanged = meta.on_epoch and isinstance(result.value, Metric) and is_gathered(result.value)
        return f"the metric {meta.metric_attribute or name_of(result.value)}" if is_exchanged else None
    if not meta.sync.should or meta.sync.rank_zero_only or meta.sync.group not in (None, group):
        return None
    return f"{meta.sync.op}, on_step={meta.on_step}, on_epoch={meta.on_epoch}"
