"""What all ranks of a job must have in common, compared when it starts and when it resumes."""

from collections.abc import Mapping
from importlib.metadata import distributions
from typing import cast

import torch

from d9d.core.agreement import agree_on, name_of
from d9d.core.dist_context import DistributedContext
from d9d.core.participants import Participants
from d9d.dataset.pack_stream import state_is_collective
from d9d.loop.component.data_stream import DataParallelMicrobatchPackStream
from d9d.loop.config import InferenceConfig, TrainerConfig
from d9d.metric.component import AccumulatorOwner
from d9d.metric.impl.container import ComposeMetric
from d9d.metric.impl.torchmetrics import TorchMetricsMetric

__all__ = ["agree_on_config", "agree_on_data", "agree_on_parts", "agree_on_resume"]

_OF_SINGLE_RANKS = {"logging": {"tracker"}, "profiling": {"traces_dir"}}
"""What only rank 0 reads, or each machine for itself."""
_MEND = "Start all ranks with the same code, the same config and the same environment."


def agree_on_config(context: DistributedContext, config: TrainerConfig | InferenceConfig) -> None:
    """Compare the config, and the versions of what runs it. All ranks must call it; blocks.

    Raises:
        ValueError: On all ranks, naming the fields that differ; so do the others.
    """
    root = "trainer" if isinstance(config, TrainerConfig) else "inference"
    fields = config.model_dump(mode="json", exclude=_OF_SINGLE_RANKS)
    own = [distribution.version for distribution in distributions(name="d9d-lightning")]  # none in a mere checkout
    versions = {"torch": torch.__version__, "d9d-lightning": own}
    agree_on(_all_ranks(context), "their configuration", {root: fields, "version": versions}, _MEND)


def agree_on_data(context: DistributedContext, stream: DataParallelMicrobatchPackStream) -> None:
    """Compare the position in the data, where it is the same on all ranks. All ranks must call it; blocks."""
    facts: dict[str, object] = {"one position for all ranks": stream.has_rank_invariant_state}
    if stream.has_rank_invariant_state and not state_is_collective(stream.inner):
        state = stream.inner.state_dict()
        facts |= {f"data.{name}": value for name, value in state.items() if isinstance(value, str | int | float)}
    mend = "Let the data provider build the same stream on every rank, which gives each of them its share."
    agree_on(_all_ranks(context), "their data", facts, mend)


def agree_on_parts(context: DistributedContext, metrics: ComposeMetric, hparams: Mapping[str, object]) -> None:
    """Compare metrics, whose values are exchanged together, and hyper-parameters. All ranks must call it; blocks."""
    facts = {"metrics": _described(metrics), "hparams": hparams}
    mend = "create_metrics() and dump_hparams() must not depend on the rank, in a pipeline neither on the stage."
    agree_on(_all_ranks(context), "the parts of the job", facts, mend)


def _described(metric: object) -> object:
    """Return what decides how a metric is exchanged: its kind, or of each part of it the operation, type and shape."""
    match metric:
        case ComposeMetric():
            return {name: _described(child) for name, child in metric.children.items()}
        case AccumulatorOwner():
            parts = [(each.reduce_op.value, each.local_value) for each in metric.accumulators()]
            return [f"{operation} of {value.dtype}, {tuple(value.shape)}" for operation, value in parts]
        case TorchMetricsMetric():
            return name_of(metric.wrapped)
        case _:
            return name_of(metric)


def agree_on_resume(context: DistributedContext, state: Mapping[str, object]) -> None:
    """Compare where ranks go on, after a checkpoint was loaded. All ranks must call it; blocks."""
    mend = "All ranks must see the same checkpoints: is checkpointing.save_dir on a file system that they share?"
    agree_on(_all_ranks(context), "where the job goes on", cast("dict[str, object]", state), mend)


def _all_ranks(context: DistributedContext) -> Participants:
    return Participants(context.groups[:1])
