"""Finds out that ranks log different keys, before one of them waits for the others, or adds up what does not belong together.

[Note: who logs what]
``self.log(..., sync_dist=True)`` is a collective, of a single number without its name. So with the first batch of each kind of
loop, and with the first end of its epoch, ranks tell each other which keys they have logged so far: before each number that is
reduced, and when the step has run. They do both by the same exchange: a rank that reduces meets one whose step is over, and
both know. Afterwards it costs nothing.
"""
# Lightning keeps what was logged to itself
# pyright: reportPrivateUsage=false

from collections.abc import Hashable

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric

from d9d.core.agreement import agree_on, name_of
from d9d.core.participants import Participants
from d9d_lightning.metrics.install import is_gathered

__all__ = ["LogAgreement"]

_MEND = (
    "Call self.log with sync_dist=True, or with a metric, for the same keys in the same order on all ranks: with 0 or NaN where "
    "a rank has no value. What one rank alone shall log takes no sync_dist, and rank_zero_only=True."
)


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
        self._agreed: set[Hashable] = set()

    def before_reduction(self) -> None:
        """Compare what was logged, before a number is reduced. Blocks the host where it compares.

        Raises:
            ValueError: On all ranks, if they log different keys.
        """
        results = self._trainer._results
        if results is None:
            return
        is_batch = self._trainer._logger_connector._first_loop_iter is not None
        key = self._loop(results) if is_batch else (self._loop(results), "end of the epoch")
        # Between batches Lightning reduces more than logs, such as the lengths of loaders.
        if key in self._agreed or not (is_batch or _reduced(results, self._group)):
            return
        self._compare(results, "in the middle of a value that is reduced")
        if not is_batch:
            self._agreed.add(key)

    def before_backward(self) -> None:
        """Compare what a step has logged that runs backward passes by itself, and goes on to log. As `before_reduction`."""
        results = self._trainer._results
        if results is not None and self._loop(results) not in self._agreed:
            self._compare(results, "before a backward pass")

    def end_step(self) -> None:
        """Compare what a step has logged, with the first batch of a loop; then it blocks the host.

        Raises:
            ValueError: On all ranks, if they have logged different keys.
        """
        if self._trainer.state.stage in self._agreed:
            return
        results = self._trainer._results
        key = None if results is None else self._loop(results)
        if results is not None and key not in self._agreed:
            self._compare(results, "at the end of the step")
            self._agreed.add(key)

    def _loop(self, results: _ResultCollection) -> Hashable:
        """Return what stands for a loop over one loader."""
        stage = self._trainer.state.stage
        return stage if results.training else (stage, results.dataloader_idx)

    def _compare(self, results: _ResultCollection, where: str) -> None:
        reduced = _reduced(results, self._group)
        facts: dict[str, object] = {"where the rank is": where, "keys": reduced, "order of the keys": list(reduced)}
        agree_on(self._participants, "what they log (here a rank is a data-parallel one)", facts, _MEND)


def _reduced(results: _ResultCollection, group: dist.ProcessGroup) -> dict[str, str]:
    """Return how keys are reduced over a group that have been logged in this epoch, without those that are not."""
    return {key: text for key, result in results.items() if (text := _operation(result, group)) is not None}


def _operation(result: _ResultMetric, group: dist.ProcessGroup) -> str | None:
    meta = result.meta
    if result.has_reset:
        return None
    if not result.is_tensor:
        # Lightning computes it for the epoch alone, and takes no notice of rank_zero_only.
        is_exchanged = meta.on_epoch and is_gathered(result.value)
        return f"the metric {meta.metric_attribute or name_of(result.value)}" if is_exchanged else None
    if not meta.sync.should or meta.sync.rank_zero_only or meta.sync.group not in (None, group):
        return None
    return f"{meta.sync.op}, on_step={meta.on_step}, on_epoch={meta.on_epoch}"
