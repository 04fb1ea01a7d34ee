"""`self.log` over a pack of microbatches: recorded per microbatch, merged per key, replayed as one call.

[Note: one log call per step]
Lightning expects one call of ``self.log`` per key and step: of several, the step shows the last, and what they are
weighed by over the epoch is the size of the loader's batch. While the user's step runs for a microbatch its calls are
therefore recorded; after the pack each key has one value over all samples, which goes through the real ``self.log``. So
do metrics, see [Note: states of a pack].
With pipelines the step runs on the last stage, and `LogExchange` takes what was recorded there to the other ranks.
"""
# Lightning keeps the rules of self.log to itself
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Number
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata
from torchmetrics import Metric
from typing_extensions import override

from d9d_lightning.logs.merge import KeyMerge, SampleCount, Scalar
from d9d_lightning.metrics.pack_values import PackValues

_FUNCTIONS: tuple[tuple[object, str], ...] = (
    (torch.mean, "mean"),
    (torch.sum, "sum"),
    (sum, "sum"),
    (torch.max, "max"),
    (max, "max"),
    (torch.min, "min"),
    (min, "min"),
)
"""The functions that Lightning takes for `reduce_fx`, and their names."""


class LogOptions(NamedTuple):
    """The arguments of ``self.log`` that stay the same for a key, with Lightning's defaults.

    A tuple, because it is compared and hashed at every call.
    """

    prog_bar: bool = False
    logger: bool | None = None
    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: str = "mean"
    enable_graph: bool = False
    sync_dist: bool = False
    sync_dist_group: dist.ProcessGroup | None = None
    add_dataloader_idx: bool = True
    metric_attribute: str | None = None
    rank_zero_only: bool = False

    def arguments(self) -> dict[str, Any]:
        """Return those that differ from the defaults, as keyword arguments.

        A class that overrides ``log`` gets what its caller has passed, and no more.
        """
        return {
            name: value
            for (name, default), value in zip(self._field_defaults.items(), self, strict=True)
            if value is not default
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One call of ``self.log``, over the microbatches of a pack.

    Attributes:
        name: The key.
        value: A detached scalar; or a metric of the module, whose path is ``options.metric_attribute``.
        batch_size: Number of samples, which the mean over an epoch weighs the value by. None where nobody needs it.
        shows_step: Whether the value of the step is shown, by argument or by Lightning's default.
        options: The other arguments.
    """

    name: str
    value: Scalar | Metric
    batch_size: Scalar | None
    shows_step: bool
    options: LogOptions


def replay(module: LightningModule, entries: Sequence[LogEntry]) -> None:
    """Log entries through the module's own ``log``, in the name of the hook that runs now.

    With pipelines all ranks must call it with the same entries: ``sync_dist`` is collective.

    Raises:
        MisconfigurationException: As by Lightning, e.g. for two entries of one key with different arguments.
    """
    for entry in entries:
        # Lightning works with a tensor as well.
        batch_size = cast("int | None", entry.batch_size)
        module.log(entry.name, entry.value, batch_size=batch_size, **entry.options.arguments())


class LogRecorder:
    """Keeps the log calls of a module while its step runs per microbatch. ``log_dict`` ends here as well.

    Mistakes are reported at the user's own call, by Lightning's own errors. A class that overrides ``log`` must keep
    Lightning's parameters; its override runs in the replay.
    """

    def __init__(self, module: LightningModule) -> None:
        """Record nothing yet.

        Args:
            module: The module whose calls are recorded.
        """
        self._module = module
        self._samples: SampleCount | None = None
        self._lightning_log: Callable[..., None] = module.log
        self._checked: dict[Hashable, _Key] = {}
        self._merges: dict[Hashable, tuple[_Key, KeyMerge]] = {}
        self._metric_paths: dict[int, tuple[Metric, str]] = {}
        self._pack_values = PackValues()

    def recording(self, batch: object) -> AbstractContextManager[None]:
        """Record the log calls of the block, which is one run of the user's step.

        If it fails, what this and earlier runs have logged since the last `take` is forgotten.

        Args:
            batch: The microbatch of this run, which tells the number of samples of calls without ``batch_size``.
        """
        return _Interception(self, SampleCount(batch))

    def dropping(self) -> AbstractContextManager[None]:
        """Ignore the log calls of the block."""
        return _Interception(self, None)

    def take(self) -> list[LogEntry]:
        """Return what was recorded since the last call, one entry per key in the order of first calls, and forget it.

        A key that only some of the runs have logged is merged over those; further calls of one run are further
        samples. Calls of one key with different arguments stay apart, which Lightning refuses in the replay.

        Metrics get their value of the pack here. With ``dist_sync_on_step`` the ranks that have recorded it must all call.
        """
        for key, merge in self._merges.values():
            value = merge.value()
            if key.shows_step and isinstance(value, Metric):
                self._pack_values.show(value)
        entries = [
            LogEntry(
                name=key.name,
                value=merge.value(),
                batch_size=merge.batch_size(),
                shows_step=key.shows_step,
                options=key.options,
            )
            for key, merge in self._merges.values()
        ]
        self.forget()
        return entries

    def forget(self) -> None:
        """Forget what was recorded since the last `take`."""
        self._merges.clear()
        self._pack_values.clear()

    def _log(
        self,
        name: str,
        value: object,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: dist.ProcessGroup | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        reduction = reduce_fx if isinstance(reduce_fx, str) else _name_of(reduce_fx)
        options = LogOptions(
            bool(prog_bar),
            logger,
            on_step,
            on_epoch,
            cast("str", reduction or reduce_fx),
            bool(enable_graph),
            bool(sync_dist),
            sync_dist_group,
            bool(add_dataloader_idx),
            metric_attribute,
            bool(rank_zero_only),
        )
        if self._is_for_lightning():
            self._lightning_log(name, value, batch_size=batch_size, **options.arguments())
        elif self._samples is not None:
            if not reduction or not _is_loggable(value):
                self._refuse(name, value, batch_size, options)
            self._record(name, cast("Scalar | Metric", value), batch_size, options, self._samples)

    def _is_for_lightning(self) -> bool:
        """Whether Lightning answers any call now by a warning or an error of its own."""
        module = self._module
        trainer = module._trainer
        return (
            trainer is None
            or trainer.barebones
            or trainer._results is None
            or module._current_fx_name is None
            or module._fabric is not None
        )

    def _refuse(self, name: str, value: object, batch_size: int | None, options: LogOptions) -> NoReturn:
        """Let Lightning raise its own error at the user's call."""
        self._lightning_log(name, value, batch_size=batch_size, **options.arguments())
        raise ValueError(
            f"self.log({name!r}, ...) cannot log a {type(value).__name__} with reduce_fx={options.reduce_fx!r}: pass a "
            f"number, a tensor of one element or a torchmetrics.Metric of the module, and mean, sum, min or max."
        )

    def _record(
        self, name: str, value: Scalar | Metric, batch_size: int | None, options: LogOptions, samples: SampleCount
    ) -> None:
        is_metric = isinstance(value, Metric)
        if is_metric and options.metric_attribute is None:
            options = self._locate_metric(name, value, options)
        call = (self._module._current_fx_name, name, is_metric, options)
        known = self._merges.get(call)
        if known is None:
            key = self._checked.get(call)
            if key is None:
                key = self._checked[call] = self._check(name, value, options)
            merge = KeyMerge(reduction=key.reduction, counts_samples=key.counts_samples)
            self._merges[call] = key, merge
        else:
            merge = known[1]
        merge.add(value, batch_size, samples)

    def _locate_metric(self, name: str, metric: Metric, options: LogOptions) -> LogOptions:
        if id(metric) not in self._metric_paths:
            self._pack_values.follow(self._module)
            # The metric is kept as well, so that no later object comes by its id.
            self._metric_paths = {
                id(child): (child, path) for path, child in self._module.named_modules() if isinstance(child, Metric)
            }
        if id(metric) not in self._metric_paths:
            self._refuse(name, metric, None, options)
        return options._replace(metric_attribute=self._metric_paths[id(metric)][1])

    def _check(self, name: str, value: Scalar | Metric, options: LogOptions) -> "_Key":
        """Return what the key needs, after Lightning has found nothing wrong with the arguments of its first call."""
        if options.add_dataloader_idx and "/dataloader_idx_" in name:
            self._refuse(name, value, None, options)
        hook = cast("str", self._module._current_fx_name)
        on_step, on_epoch = _FxValidator.check_logging_and_get_default_levels(hook, options.on_step, options.on_epoch)
        metadata = _Metadata(
            fx=hook, name=name, on_step=on_step, on_epoch=on_epoch, reduce_fx=cast("Any", options.reduce_fx)
        )
        return _Key(
            name=name,
            options=options,
            # Lightning has replaced the string by torch's function.
            reduction=cast("str", _name_of(metadata.reduce_fx)),
            shows_step=on_step,
            counts_samples=on_epoch and metadata.is_mean_reduction and not isinstance(value, Metric),
        )


class _Interception(AbstractContextManager[None]):
    """A class, not a generator: it is entered for each microbatch."""

    def __init__(self, recorder: LogRecorder, samples: SampleCount | None) -> None:
        self._recorder = recorder
        self._samples = samples

    @override
    def __enter__(self) -> None:
        recorder = self._recorder
        attributes = vars(recorder._module)
        self._outer = recorder._samples, recorder._lightning_log, attributes.get("log")
        recorder._samples, recorder._lightning_log = self._samples, recorder._module.log
        attributes["log"] = recorder._log
        if self._samples is not None:
            recorder._pack_values.begin_microbatch()

    @override
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        recorder = self._recorder
        if self._samples is not None:
            recorder._pack_values.end_microbatch()
        recorder._samples, recorder._lightning_log, log = self._outer
        attributes = vars(recorder._module)
        if log is None:
            del attributes["log"]
        else:
            attributes["log"] = log
        if kind is not None and self._samples is not None:
            recorder.forget()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    name: str
    options: LogOptions
    reduction: str
    shows_step: bool
    counts_samples: bool


def _name_of(function: object) -> str | None:
    return next((name for known, name in _FUNCTIONS if function is known), None)


def _is_loggable(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (float, int, Metric)) or (isinstance(value, Number) and not isinstance(value, complex))
