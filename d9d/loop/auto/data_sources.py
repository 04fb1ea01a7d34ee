"""What the elements of a job's microbatches are made of: one dataset or a mixture of several, as it is or packed."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias, assert_never, cast

from pydantic import Field

from d9d.core.config import Config
from d9d.dataset.lanes import (
    BestFitPacker,
    DataPlan,
    LaneMixture,
    LaneRecords,
    LaneStream,
    MapDataset,
    MixtureSchedule,
    PackedSequence,
    RecordLoader,
    WrapPacker,
    dataset_fingerprint,
)
from d9d.dataset.sharded import dataset_length, derive_seed

__all__ = [
    "BestFitPackingConfig",
    "PackingConfig",
    "Sources",
    "WrapPackingConfig",
    "build_lane",
    "mixture_problems",
    "named_sources",
    "recipe_of",
    "sources_fingerprint",
]

Sources: TypeAlias = dict[str, MapDataset]
"""Datasets by name, in the order of their names; one that is not mixed has no name."""


class WrapPackingConfig(Config):
    """Cuts the concatenation of documents into sequences of equal length: no token is lost, none is padding."""

    kind: Literal["wrap"]
    num_tokens: int = Field(ge=1, description="Tokens of a sequence.")


class BestFitPackingConfig(Config):
    """Fills sequences with whole documents that fit together. Only documents longer than a sequence are cut."""

    kind: Literal["best_fit"]
    num_tokens: int = Field(ge=1, description="Most tokens of a sequence.")
    buffer_size: int = Field(
        default=64,
        ge=1,
        description=(
            "Documents, or pieces of long ones, that each lane chooses from. Default: little is left empty with documents "
            "of mixed lengths, and a position stays below a few KiB per lane."
        ),
    )


PackingConfig: TypeAlias = Annotated[WrapPackingConfig | BestFitPackingConfig, Field(discriminator="kind")]


def mixture_problems(weights: Mapping[str, int]) -> list[str]:
    """Return what is wrong with the weights of a mixture."""
    problems = [
        f"mixture: the weight of {name!r} ({weight}) must be at least 1"
        for name, weight in weights.items()
        if weight < 1
    ]
    if problems or not weights:
        return problems
    try:
        MixtureSchedule(list(weights.values()))
    except ValueError as error:
        return [f"mixture: {str(error).rstrip('.')}"]
    return []


def named_sources(built: object, weights: Mapping[str, int]) -> Sources:
    """Return the datasets that a factory has built, in an order that does not depend on the factory or the config.

    Args:
        built: A dataset, or datasets by name.
        weights: Weight of each dataset of a mixture; empty for one dataset.

    Raises:
        ValueError: They are not those of the mixture.
    """
    if not isinstance(built, Mapping):
        if weights:
            raise ValueError(
                f"data.mixture draws from {', '.join(sorted(weights))}, but dataset_factory returned a {type(built).__name__}: "
                "let it return a dict of these datasets."
            )
        return {"": cast("MapDataset", built)}
    datasets = cast("Mapping[str, MapDataset]", built)
    if set(datasets) != set(weights):
        raise ValueError(
            f"dataset_factory returned the datasets {', '.join(sorted(map(str, datasets)))}, and data.mixture has weights for "
            f"{', '.join(sorted(weights)) or 'none'}: give each of them a weight, or return one dataset."
        )
    return {name: datasets[name] for name in sorted(datasets)}


def sources_fingerprint(sources: Sources, *, in_process_of_its_own: bool) -> str:
    """Return a text that changes with the samples of any source; see `dataset_fingerprint`."""
    texts = (
        f"{name}={dataset_fingerprint(source, in_process_of_its_own=in_process_of_its_own)}".lstrip("=")
        for name, source in sources.items()
    )
    return " ".join(texts)


def recipe_of(sources: Sources, weights: Mapping[str, int], packing: PackingConfig | None, *, shuffle: bool) -> str:
    """Return how elements are made of samples, as text to compare at a resume; empty if they are the samples themselves."""
    parts: list[str] = []
    if packing is not None:
        parts.append(" ".join(f"{name}={value}" for name, value in packing.model_dump().items()))
    if weights:
        parts.extend(f"{weights[name]} of {name} ({dataset_length(source)})" for name, source in sources.items())
        parts.append("shuffled" if shuffle else "in order")
    return ", ".join(parts)


def build_lane(
    sources: Sources,
    weights: Mapping[str, int],
    packing: PackingConfig,
    plan: DataPlan,
    lane: int,
    *,
    loader: RecordLoader,
    seeds_generators: bool,
) -> LaneStream[PackedSequence]:
    """Build the packed sequences of a lane, of all sources in the proportions of their weights.

    Each source is read in epochs of its own, and packed by itself.

    Args:
        sources: Datasets of documents.
        weights: Sequences of each source in a period; empty for one source.
        packing: How documents become sequences.
        plan: Seed, order and lanes of the run.
        lane: Index of the lane.
        loader: Shared by the lanes of the rank.
        seeds_generators: As for `LaneRecords`.
    """
    records = (
        LaneRecords(source, _plan_of(plan, source, number), lane, loader=loader, seeds_generators=seeds_generators)
        for number, source in enumerate(sources.values())
    )
    streams = [_packer(packing, each) for each in records]
    if not weights:
        return streams[0]
    return LaneMixture(streams, [weights[name] for name in sources], lane, plan.num_lanes)


def _packer(packing: PackingConfig, records: LaneRecords) -> LaneStream[PackedSequence]:
    match packing:
        case WrapPackingConfig():
            return WrapPacker(records, packing.num_tokens)
        case BestFitPackingConfig():
            return BestFitPacker(records, packing.num_tokens, packing.buffer_size)
        case _:
            assert_never(packing)


def _plan_of(plan: DataPlan, source: MapDataset, number: int) -> DataPlan:
    return dataclasses.replace(plan, num_samples=dataset_length(source), seed=derive_seed(plan.seed, number))
