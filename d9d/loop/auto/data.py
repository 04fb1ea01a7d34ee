"""The data stream of a job from a map-style dataset and a config."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, Dataset, Sampler

from d9d.core.device import pin_memory_supported
from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.core.protocol import MicrobatchPackStream
from d9d.core.types import CollateFn, MicrobatchPack
from d9d.dataset.global_batch import EpochOrder, GlobalBatchPlan
from d9d.dataset.pack_stream import (
    PinMemoryMicrobatchPackStream,
    global_batch_problems,
    num_microbatches_for_global_batch,
)
from d9d.dataset.sharded import ShardIndexingMode, dataset_length, derive_seed, refuse_changed_state
from d9d.loop.control import DataProvider, InitializeDataProviderContext

__all__ = ["AutoDataConfig", "AutoDataProvider", "DatasetFactory"]

# `Any`: samples are of whatever type the dataset yields and the collate function takes.
DatasetFactory: TypeAlias = Callable[[DistributedContext], Dataset[Any]]
"""Builds the dataset. Called once on every rank; all of them must build the same one."""

_FORMAT_VERSION = 1


class AutoDataConfig(BaseModel):
    """Sets how a dataset becomes packs."""

    model_config = ConfigDict(extra="forbid")

    global_batch_size: int = Field(ge=1, description="Samples per step over all ranks, whatever their number.")
    microbatch_size: int = Field(ge=1, description="Samples per forward pass on one rank.")
    shard_indexing_mode: ShardIndexingMode = Field(
        default=ShardIndexingMode.sequential,
        description=(
            "How samples are dealt out to data-parallel ranks. Default 'sequential': a step trains on the same samples "
            "for any number of ranks. 'chunked': each rank reads a block of neighbours, for data that is slow to seek."
        ),
    )
    shuffle: bool = Field(default=False, description="Draw another order of all samples for each epoch.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of the shuffle and of the loader workers.")
    num_epochs: int | None = Field(
        default=1,
        ge=1,
        description=(
            "Passes over the data until the stream ends. Default 1: a job that asks for more steps fails when the data "
            "ends. null: go on for ever; set schedule.total_steps then."
        ),
    )
    drop_last: bool = Field(
        default=True,
        description=(
            "Leave out samples at the end of an epoch that do not fill a global batch. Default: all steps weigh the same. "
            "false: train on them too, filled up to a multiple of the ranks with samples from the start of the epoch."
        ),
    )
    num_workers: int = Field(ge=0, description="Loader processes per rank; 0 loads in the process that trains.")
    pin_memory: bool = Field(
        default=True, description="Copy packs to page-locked memory where the device profits. Default: faster copies."
    )
    persistent_workers: bool = Field(default=False, description="Keep loader processes when the stream starts anew.")
    prefetch_factor: int | None = Field(
        default=None, ge=1, description="Microbatches that each loader process loads ahead. Default: PyTorch's."
    )
    timeout: float = Field(
        default=0.0, ge=0, description="Seconds to wait for a microbatch of a loader process. Default 0: for ever."
    )

    @model_validator(mode="after")
    def _check_sizes_and_workers(self) -> Self:
        problems: list[str] = []
        if self.global_batch_size % self.microbatch_size:
            problems.append(
                f"global_batch_size ({self.global_batch_size}) is not a multiple of microbatch_size "
                f"({self.microbatch_size})"
            )
        if self.num_workers == 0:
            problems.extend(
                f"{name} ({value}) needs num_workers >= 1"
                for name, value, is_set in (
                    ("persistent_workers", self.persistent_workers, self.persistent_workers),
                    ("prefetch_factor", self.prefetch_factor, self.prefetch_factor is not None),
                    ("timeout", self.timeout, self.timeout > 0),
                )
                if is_set
            )
        if problems:
            raise ValueError("; ".join(problems) + ".")
        return self


class AutoDataProvider(DataProvider):
    """Builds a stream that shards, shuffles, collates and packs a map-style dataset, and that can be resumed.

    The state of the stream is the same on all ranks. With sequential indexing, a run can be resumed with another number
    of data-parallel ranks, another microbatch size or other loader settings; another dataset length, global batch size,
    seed or shuffle is refused.

    Args:
        dataset_factory: Builds the dataset.
        collator: Makes a microbatch from its samples.
        config: Sizes, order and loader settings.
    """

    def __init__(self, dataset_factory: DatasetFactory, collator: CollateFn, config: AutoDataConfig) -> None:
        self._dataset_factory = dataset_factory
        self._collator = collator
        self._config = config

    def mesh_problems(self, mesh: DeviceMeshParameters) -> list[str]:
        """Return why the global batch does not fit a mesh, if it does not."""
        return global_batch_problems(mesh.data_parallel, self._config.global_batch_size, self._config.microbatch_size)

    def __call__(self, context: InitializeDataProviderContext) -> MicrobatchPackStream:
        """Build the stream of this rank.

        Raises:
            ValueError: The global batch does not fit the mesh, or the dataset is smaller than one.
            TypeError: The dataset has no length.
        """
        dist_context = context.dist_context
        config = self._config
        num_microbatches_for_global_batch(dist_context, config.global_batch_size, config.microbatch_size)
        dataset = self._dataset_factory(dist_context)
        plan = GlobalBatchPlan(
            num_samples=dataset_length(dataset),
            global_batch_size=config.global_batch_size,
            microbatch_size=config.microbatch_size,
            dp_size=dist_context.dp_size,
            dp_rank=dist_context.dp_rank,
            mode=config.shard_indexing_mode,
            drop_last=config.drop_last,
        )
        stream = GlobalBatchPackStream(dataset, self._collator, plan, config)
        if not config.pin_memory:
            return stream
        return PinMemoryMicrobatchPackStream(stream, is_supported=pin_memory_supported(dist_context.current_device))


class GlobalBatchPackStream(MicrobatchPackStream):
    """Loads the packs of one rank by a plan, from any step on.

    The position is a number of steps: it counts packs that were handed out, not those that loader processes have read
    ahead, and moving to it loads nothing.

    Args:
        dataset: Map-style dataset of at least one step.
        collator: Makes a microbatch from its samples.
        plan: Places samples into steps and ranks.
        config: Order, epochs and loader settings.
    """

    def __init__(
        self, dataset: Dataset[Any], collator: CollateFn, plan: GlobalBatchPlan, config: AutoDataConfig
    ) -> None:
        if plan.steps_per_epoch == 0:
            raise ValueError(
                f"the dataset has {plan.num_samples} samples, fewer than one global batch "
                f"(global_batch_size {plan.global_batch_size}): lower global_batch_size, or set drop_last to false."
            )
        self._dataset = dataset
        self._plan = plan
        self._seed = config.seed
        self._shuffle = config.shuffle
        self._num_epochs = config.num_epochs
        self._consumed_steps = 0
        self._worker_seeds = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=_MicrobatchSampler(self),
            collate_fn=collator,
            num_workers=config.num_workers,
            persistent_workers=config.persistent_workers,
            prefetch_factor=config.prefetch_factor,
            timeout=config.timeout,
            generator=self._worker_seeds,
        )

    @property
    def has_rank_invariant_state(self) -> bool:
        """Tell that the state is the same on every rank."""
        return True

    @property
    def global_batch_size(self) -> int | None:
        """Number of samples of a step over all ranks."""
        return self._plan.global_batch_size

    @property
    def total_steps(self) -> int | None:
        """Number of packs of all epochs, or None if the stream never ends."""
        return None if self._num_epochs is None else self._num_epochs * self._plan.steps_per_epoch

    def remaining_microbatches(self) -> Iterator[list[int]]:
        """Yield the sample indices of each microbatch from the current position on."""
        order = EpochOrder(self._plan.num_samples, self._shuffle, self._seed)
        for epoch, step in self._remaining_steps():
            for positions in self._plan.microbatches(step):
                yield order.samples(epoch, positions)

    def _remaining_steps(self) -> Iterator[tuple[int, int]]:
        start, total = self._consumed_steps, self.total_steps
        steps = itertools.count(start) if total is None else range(start, total)
        return (divmod(step, self._plan.steps_per_epoch) for step in steps)

    def __iter__(self) -> Iterator[MicrobatchPack[Any]]:
        # Loader processes get other seeds on each data-parallel rank and, after a resume, at each position.
        self._worker_seeds.manual_seed(derive_seed(self._seed, self._plan.dp_rank, self._consumed_steps))
        microbatches = iter(self._loader)
        for _, step in self._remaining_steps():
            pack = tuple(itertools.islice(microbatches, self._plan.num_microbatches(step)))
            self._consumed_steps += 1
            yield pack

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last pack that was handed out; the same on all ranks."""
        state = {"consumed_steps": self._consumed_steps, **self._identity()}
        if isinstance(self._dataset, Stateful):
            state["dataset"] = self._dataset.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to a saved position. It takes effect at the next `iter()`.

        Raises:
            ValueError: The position would mean other samples now; names each value that differs.
        """
        refuse_changed_state("the data stream", state_dict, self._identity())
        if isinstance(self._dataset, Stateful):
            self._dataset.load_state_dict(state_dict["dataset"])
        self._consumed_steps = state_dict["consumed_steps"]

    def _identity(self) -> dict[str, Any]:
        return {
            "version": _FORMAT_VERSION,
            "seed": self._seed,
            "shuffle": self._shuffle,
            **self._plan.identity(),
        }


class _MicrobatchSampler(Sampler[list[int]]):
    """Yields sample indices of the remaining microbatches; runs in the process that trains."""

    def __init__(self, stream: GlobalBatchPackStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[list[int]]:
        return self._stream.remaining_microbatches()
