"""The data stream of a job from a map-style dataset and a config."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeAlias, TypedDict

import torch.distributed as dist
from pydantic import Field, model_validator
from torch.utils.data import Dataset

from d9d.core.config import Config
from d9d.core.device import pin_memory_supported
from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.core.protocol import MicrobatchPackStream
from d9d.core.types import CollateFn
from d9d.dataset.lanes import (
    AttachWeights,
    BatchSchedule,
    DataPlan,
    ElasticLaneStream,
    ElasticMapStream,
    LoaderOptions,
    MixtureDataset,
    RampPoint,
    RecordLoader,
    SeededDataset,
    StepRange,
    Tail,
)
from d9d.dataset.pack_stream import PinMemoryMicrobatchPackStream, global_batch_problems
from d9d.dataset.sharded import ShardIndexingMode, dataset_length
from d9d.internals.model_states import failing_together
from d9d.loop.auto.data_sources import (
    PackingConfig,
    Sources,
    build_lane,
    mixture_problems,
    named_sources,
    recipe_of,
    sources_fingerprint,
)
from d9d.loop.control import DataProvider, InitializeDataProviderContext

__all__ = [
    "ANY_NUM_SAMPLES",
    "AutoDataConfig",
    "AutoDataProvider",
    "DatasetFactory",
    "build_data_plan",
    "rank_problems",
]

# `Any`: samples are of whatever type the dataset yields and the collate function takes.
DatasetFactory: TypeAlias = Callable[[DistributedContext], Dataset[Any] | Mapping[str, Dataset[Any]]]
"""Builds the dataset, or those of a mixture by name. Called once on every rank; all of them must build the same."""

ANY_NUM_SAMPLES = 2**40
"""Stands for the size of a dataset that is not known yet, where it does not matter, and of one without an end."""


class AutoDataConfig(Config):
    """Sets how a dataset becomes packs."""

    global_batch_size: int = Field(ge=1, description="Samples per step over all ranks, whatever their number.")
    microbatch_size: int = Field(ge=1, description="Samples per forward pass on one rank.")
    shard_indexing_mode: ShardIndexingMode = Field(
        default=ShardIndexingMode.sequential,
        description=(
            "Which samples of an epoch a step takes. Default 'sequential': neighbours. 'chunked': some from each of `lanes` "
            "blocks, so that each rank reads few places of the dataset from front to back, for data that is slow to seek."
        ),
    )
    shuffle: bool = Field(default=False, description="Draw another order of all samples for each epoch.")
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="Seed of the shuffle and of random numbers that loading a sample draws."
    )
    num_epochs: int | None = Field(
        default=1,
        ge=1,
        description=(
            "Passes over the data until the stream ends. Default 1: a job that asks for more steps fails when the data "
            "ends. null: go on for ever; set schedule.total_steps then."
        ),
    )
    num_samples: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Samples of the dataset. Default: its length. A dataset of another length is refused, and `python -m d9d data "
            "plan` can show numbers without it."
        ),
    )
    drop_last: bool = Field(
        default=True,
        description=(
            "Leave out samples at the end of an epoch that do not fill a global batch. Default: all steps weigh the same. "
            "false: they form a last step with fewer samples, each of them once."
        ),
    )
    tail: Tail | None = Field(
        default=None,
        description=(
            "What happens to samples at the end of an epoch that do not fill a global batch, instead of drop_last: 'drop', "
            "'short' (what drop_last: false means), 'wrap' (a step takes the first samples of the next epoch too) or 'pad' "
            "(repeated samples that weigh nothing). Default: as drop_last says."
        ),
    )
    lanes: int = Field(
        default=0,
        ge=0,
        description=(
            "Equal parts of every step that are dealt out to data-parallel ranks. The run can start and resume on any number "
            "of ranks that divides it. Default 0: as many as microbatches, which allows most."
        ),
    )
    global_batch_ramp: dict[int, int] = Field(
        default={},
        description="Other global batch sizes, by the step (from 1) that they start at. Needs tail 'wrap'.",
    )
    skip_steps: list[tuple[int, int]] = Field(
        default=[],
        description=(
            "Steps, as pairs of first and last (from 1), whose samples are jumped over, such as those before a loss spike. "
            "Set it when you resume from a checkpoint before them. With packing, their documents are loaded, and dropped."
        ),
    )
    mixture: dict[str, int] = Field(
        default={},
        description=(
            "Draws from several datasets: of as many samples as all weights sum up to, each dataset gives as many as its "
            "weight, in epochs of its own. dataset_factory returns these datasets by name. Needs num_epochs null, tail 'wrap'. "
            "Default: one dataset."
        ),
    )
    packing: PackingConfig | None = Field(
        default=None,
        description=(
            "Make sequences out of documents, 1-d tensors of tokens: the collate function gets PackedSequence, and batch sizes "
            "count sequences. Needs num_epochs null, tail 'wrap'. Default: samples are taken as they are."
        ),
    )
    fingerprint: bool = Field(
        default=True,
        description=(
            "Keep a digest of some 34 samples in checkpoints, so that a run does not resume on other data. Default: one "
            "rank loads them at the start. false: for datasets whose samples differ each time, or take long to load."
        ),
    )
    seeds_generators: bool | None = Field(
        default=None,
        description=(
            "Seed the global generators of PyTorch, NumPy and Python for each microbatch, so that random numbers do not "
            "depend on ranks and workers. Default: unless the dataset takes seeds itself (SeededDataset). With num_workers "
            "0 or packing it keeps reading on the main thread, without data_prefetch: set false if nothing draws random numbers."
        ),
    )
    num_workers: int = Field(ge=0, description="Loader processes per rank; 0 loads in the process that trains.")
    pin_memory: bool = Field(
        default=True, description="Copy packs to page-locked memory where the device profits. Default: faster copies."
    )
    persistent_workers: bool = Field(default=False, description="Keep loader processes when the stream starts anew.")
    prefetch_factor: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Microbatches, or with packing the documents of as many, that each loader process loads ahead. Default: PyTorch's."
        ),
    )
    timeout: float = Field(
        default=0.0, ge=0, description="Seconds to wait for a microbatch of a loader process. Default 0: for ever."
    )

    @model_validator(mode="after")
    def _check_sizes_and_workers(self) -> Self:
        problems: list[str] = []
        try:
            build_data_plan(self, self.num_samples or ANY_NUM_SAMPLES)
        except ValueError as error:
            problems.append(str(error).rstrip("."))
        if (
            self.tail is not None
            and "drop_last" in self.model_fields_set
            and self.drop_last != (self.tail is Tail.drop)
        ):
            problems.append(f"drop_last ({self.drop_last}) contradicts tail ({self.tail.value!r}): leave drop_last out")
        problems.extend(_source_problems(self))
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


def _source_problems(config: AutoDataConfig) -> list[str]:
    """Return which settings do not go with a mixture or with packing."""
    is_mixed, is_packed = bool(config.mixture), config.packing is not None
    if not (is_mixed or is_packed):
        return []
    what = "packing" if is_packed else "mixture"
    tail = None if config.tail is None else config.tail.value
    settings: list[tuple[str, object, bool, str]] = [
        ("num_epochs", config.num_epochs, config.num_epochs is not None, "which has no end: set null"),
        ("tail", tail, config.tail is not Tail.wrap, "whose steps go over the ends of epochs: set 'wrap'"),
        (
            "num_samples",
            config.num_samples,
            is_mixed and config.num_samples is not None,
            "of several datasets: leave it out",
        ),
    ]
    problems = [
        f"{name} ({value}) does not go with {what}, {why}" for name, value, is_unfit, why in settings if is_unfit
    ]
    return [*problems, *mixture_problems(config.mixture)]


def build_data_plan(config: AutoDataConfig, num_samples: int) -> DataPlan:
    """Return which samples each step, microbatch and rank reads.

    Args:
        config: Sizes and order.
        num_samples: Samples of the dataset.

    Raises:
        ValueError: They do not fit together; names all problems.
    """
    tail = config.tail or (Tail.drop if config.drop_last else Tail.short)
    if 1 in config.global_batch_ramp:
        raise ValueError(
            "global_batch_ramp begins at a later step than 1: the size of the first steps is global_batch_size."
        )
    ramp = {1: config.global_batch_size, **config.global_batch_ramp}
    return DataPlan(
        num_samples=num_samples,
        schedule=BatchSchedule(
            ramp=tuple(RampPoint(step - 1, size) for step, size in sorted(ramp.items())),
            skips=tuple(StepRange(first - 1, last) for first, last in sorted(config.skip_steps)),
        ),
        microbatch_size=config.microbatch_size,
        num_lanes=config.lanes,
        seed=config.seed,
        shuffle=config.shuffle,
        tail=tail,
        is_chunked=config.shard_indexing_mode is ShardIndexingMode.chunked,
        num_epochs=config.num_epochs,
    )


def rank_problems(config: AutoDataConfig, dp_size: int) -> list[str]:
    """Return why a run cannot start or resume on a number of data-parallel ranks, each with a way to mend it."""
    problems = [
        problem
        for size in (config.global_batch_size, *config.global_batch_ramp.values())
        for problem in global_batch_problems(dp_size, size, config.microbatch_size)
    ]
    return problems or build_data_plan(config, ANY_NUM_SAMPLES).dp_problems(dp_size)


def _loader_options(config: AutoDataConfig) -> LoaderOptions:
    return LoaderOptions(
        num_workers=config.num_workers,
        persistent_workers=config.persistent_workers,
        prefetch_factor=config.prefetch_factor,
        timeout_s=config.timeout,
    )


class _StreamOptions(TypedDict):
    """What streams over samples and streams of lanes both take."""

    dp_size: int
    dp_rank: int
    fingerprint: str
    recipe: str
    seeds_generators: bool


class AutoDataProvider(DataProvider):
    """Builds a stream that orders, shuffles, collates and packs a map-style dataset, and that can be resumed.

    Microbatches are the same, in content and order, on any number of data-parallel ranks that divides the lanes and with
    any number of workers, and so is a run that resumes on another number of them. See `ElasticMapStream`.

    Args:
        dataset_factory: Builds the dataset.
        collator: Makes a microbatch from its samples.
        config: Sizes, order and loader settings.
        attach_weights: Puts the weights of samples into microbatches, such as `add_weights`; needed for `Tail.pad`.
    """

    def __init__(
        self,
        dataset_factory: DatasetFactory,
        collator: CollateFn,
        config: AutoDataConfig,
        attach_weights: AttachWeights | None = None,
    ) -> None:
        self._dataset_factory = dataset_factory
        self._collator = collator
        self._config = config
        self._attach_weights = attach_weights

    def mesh_problems(self, mesh: DeviceMeshParameters) -> list[str]:
        """Return why the samples of a step cannot be dealt out on a mesh, if they cannot."""
        return rank_problems(self._config, mesh.data_parallel)

    def __call__(self, context: InitializeDataProviderContext) -> MicrobatchPackStream:
        """Build the stream of this rank. All ranks must call it; blocks until the first has taken the fingerprint.

        Raises:
            ValueError: The global batch does not fit the mesh, the dataset is smaller than one, or ranks have datasets of
                different sizes.
            TypeError: The dataset has no length.
        """
        dist_context, config = context.dist_context, self._config
        problems = self.mesh_problems(dist_context.mesh_params)
        if problems:
            raise ValueError(" ".join(problems))
        with failing_together(dist_context):
            sources = named_sources(self._dataset_factory(dist_context), config.mixture)
            lengths = [dataset_length(source) for source in sources.values()]
            num_samples = ANY_NUM_SAMPLES if config.mixture else lengths[0]
            if config.num_samples not in (None, num_samples):
                raise ValueError(f"the dataset has {num_samples} samples, but num_samples says {config.num_samples}.")
            plan = build_data_plan(config, num_samples)
        seeds_generators = config.seeds_generators
        if seeds_generators is None:
            seeds_generators = not all(isinstance(source, SeededDataset) for source in sources.values())
        common: _StreamOptions = {
            "dp_size": dist_context.dp_size,
            "dp_rank": dist_context.dp_rank,
            "fingerprint": self._agree_on_sources(dist_context, sources, lengths),
            "recipe": recipe_of(sources, config.mixture, config.packing, shuffle=config.shuffle),
            "seeds_generators": seeds_generators,
        }
        if config.packing is None:
            stream = self._build_map_stream(sources, plan, common)
        else:
            stream = self._build_lane_stream(sources, config.packing, plan, common)
        if not config.pin_memory:
            return stream
        return PinMemoryMicrobatchPackStream(stream, is_supported=pin_memory_supported(dist_context.current_device))

    def _build_map_stream(self, sources: Sources, plan: DataPlan, common: _StreamOptions) -> MicrobatchPackStream:
        config = self._config
        dataset, *_ = sources.values()
        if config.mixture:
            weights = [config.mixture[name] for name in sources]
            dataset = MixtureDataset(
                list(sources.values()), weights, num_samples=plan.num_samples, seed=plan.seed, shuffle=plan.shuffle
            )
            # The mixture shuffles its sources; another shuffle would spoil the proportions within a step.
            plan = dataclasses.replace(plan, shuffle=False)
        return ElasticMapStream(
            dataset,
            self._collator,
            plan,
            loader=_loader_options(config),
            attach_weights=self._attach_weights,
            **common,
        )

    def _build_lane_stream(
        self, sources: Sources, packing: PackingConfig, plan: DataPlan, common: _StreamOptions
    ) -> MicrobatchPackStream:
        if self._attach_weights is not None:
            raise ValueError(
                "attach_weights has nothing to say about packed sequences, all of which count: leave it out."
            )
        weights, seeds_generators = self._config.mixture, common["seeds_generators"]
        loader = RecordLoader(_loader_options(self._config))
        return ElasticLaneStream(
            lambda lane: build_lane(
                sources, weights, packing, plan, lane, loader=loader, seeds_generators=seeds_generators
            ),
            self._collator,
            plan,
            loader=loader,
            **common,
        )

    def _agree_on_sources(self, dist_context: DistributedContext, sources: Sources, lengths: list[int]) -> str:
        """Return the fingerprint of the datasets as rank 0 sees them, and refuse those of other sizes on other ranks."""
        fingerprint = ""
        with failing_together(dist_context):
            if self._config.fingerprint and dist_context.is_main_process:
                has_workers = self._config.num_workers > 0
                fingerprint = sources_fingerprint(sources, in_process_of_its_own=has_workers)
        if not dist_context.is_distributed:
            return fingerprint
        of_first: list[Any] = [fingerprint, lengths]
        dist.broadcast_object_list(of_first, src=0)
        with failing_together(dist_context):
            if of_first[1] != lengths:
                here, there = (", ".join(map(str, each)) for each in (lengths, of_first[1]))
                raise ValueError(
                    f"the dataset has {here} samples here, but {there} on rank 0: dataset_factory must build "
                    "the same one on every rank. The stream gives each rank its share."
                )
        return of_first[0]
