"""Loads single samples, with random numbers that follow from their position and errors that name it."""

from typing import Any, Protocol, runtime_checkable

from d9d.dataset.lanes.generators import seed_generators
from d9d.dataset.lanes.permutation import mix64
from d9d.dataset.sharded import derive_seed

__all__ = [
    "MapDataset",
    "SampleError",
    "SampleSeeds",
    "SeededDataset",
    "load_sample",
]

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


class MapDataset(Protocol):
    """Describes a dataset with a length and access by index."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    # `Any`: samples are of whatever type the collate function takes.
    def __getitem__(self, index: int, /) -> Any:  # noqa: ANN401
        """Load a sample."""
        ...


@runtime_checkable
class SeededDataset(Protocol):
    """Describes a dataset whose samples need random numbers, such as crops or masks, and that takes a seed for them.

    It is called instead of `__getitem__`. It must draw from a generator of its own that it seeds with what it is given:
    then no global generator has to be seeded for each sample, and threads do not disturb each other.
    """

    def getitem_seeded(self, index: int, seed: int) -> Any:  # noqa: ANN401 - as in `MapDataset`
        """Load a sample.

        Args:
            index: Index of the sample.
            seed: From 0 to 2**63 - 1; another one each time that the sample is used in the run.
        """
        ...


class SampleError(RuntimeError):
    """Says which sample could not be loaded, or which ones not be collated; the cause is what the dataset raised."""


class SampleSeeds:
    """Gives each position of a run a seed that follows from the seed of the run, whoever loads the sample.

    Args:
        seed: Seed of the run.
    """

    def __init__(self, seed: int) -> None:
        self._start = derive_seed(seed, 0)

    def at(self, position: int) -> int:
        """Return the seed of a position: the number at this place of a SplitMix64 generator."""
        return mix64(self._start + (position + 1) * _GOLDEN_GAMMA) >> 1


# `Any`: see `MapDataset`.
def load_sample(dataset: MapDataset, index: int, seed: int, *, seeds_generators: bool = True) -> Any:  # noqa: ANN401
    """Load a sample with random numbers that follow from a seed.

    A dataset that takes seeds (`SeededDataset`) gets this one. For others, the global generators on the CPU are seeded,
    and left where loading leaves them.

    Args:
        dataset: Map-style dataset.
        index: Index of the sample.
        seed: Seed for this sample alone.
        seeds_generators: Whether to seed the global generators. Without, datasets draw from wherever they are.
    """
    if isinstance(dataset, SeededDataset):
        return dataset.getitem_seeded(index, seed)
    if seeds_generators:
        seed_generators(seed)
    return dataset[index]
