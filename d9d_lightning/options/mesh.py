"""The parallelism degrees as a user writes them, one of which the number of processes may decide."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import ValidationError

from d9d.core.config import config_problems
from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.mesh_groups import RankLayout
from d9d.core.module_names import did_you_mean

__all__ = ["MeshOption", "MeshSpec", "replica_of"]

MeshSpec = DeviceMeshParameters | Mapping[str, int | Literal["auto"]] | Literal["auto"] | None
"""Degrees by name, where one may be -1 or "auto"; or "auto" and None, which replicate over all processes."""

_OPEN = (-1, "auto")
_NOT_OPEN = "expert_parallel"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeshOption:
    """Degrees, of which at most one is open: as large as the number of processes allows."""

    degrees: Mapping[str, int]
    """The given degrees; the open one is left out."""
    open_degree: str | None
    """Name of the open degree."""

    @classmethod
    def read(cls, mesh: MeshSpec) -> Self:
        """Read what a user has written.

        Raises:
            ValueError: For several open degrees, unknown names and values that are no degrees.
        """
        if isinstance(mesh, DeviceMeshParameters):
            return cls(degrees=mesh.model_dump(), open_degree=None)
        if not isinstance(mesh, Mapping):
            if mesh not in (None, "auto"):
                raise ValueError(f"mesh ({mesh!r}) must be 'auto', a mapping of degrees or a DeviceMeshParameters.")
            return cls(degrees={}, open_degree="data_parallel_replicate")
        written = dict(mesh)
        _refuse_bad_entries(written)
        opened = [name for name, degree in written.items() if degree in _OPEN]
        if len(opened) > 1 or _NOT_OPEN in opened:
            raise ValueError(
                f"mesh: {' and '.join(opened)} cannot be left open (-1). One degree can, {_NOT_OPEN} excepted, which "
                f"only regroups other ranks."
            )
        # The number of experts is checked when all ranks are known.
        numbers = {name: 1 if name in opened else degree for name, degree in written.items()}
        _degrees(numbers if not opened else {**numbers, _NOT_OPEN: 1})
        degrees = {name: int(degree) for name, degree in written.items() if name not in opened}
        return cls(degrees=degrees, open_degree=opened[0] if opened else None)

    @property
    def smallest(self) -> DeviceMeshParameters:
        """The degrees with 1 for the open one."""
        known = {name: degree for name, degree in self.degrees.items() if name != _NOT_OPEN or not self.open_degree}
        return DeviceMeshParameters(**known)

    def fill(self, num_processes: int) -> DeviceMeshParameters:
        """Return the degrees for a number of processes.

        Raises:
            ValueError: If the processes cannot be shared out; without an open degree, any number is taken.
        """
        if self.open_degree is None:
            return _degrees(self.degrees)
        given = self.smallest.world_size
        if num_processes % given != 0:
            factors = " x ".join(f"{name} {degree}" for name, degree in self.degrees.items() if degree > 1)
            raise ValueError(
                f"{self.open_degree} takes what the other degrees of the mesh leave, but {num_processes} processes "
                f"(devices * num_nodes) are no multiple of {factors} = {given}. Use {given} or {2 * given} processes, "
                f"or other degrees."
            )
        return _degrees({**self.degrees, self.open_degree: num_processes // given})


def replica_of(params: DeviceMeshParameters, rank: int) -> int:
    """Return which of the data-parallel parts of the samples a rank reads. Arithmetic, before any group exists."""
    layout = RankLayout(shape=params.root_shape, rank=rank)
    return layout.coordinate("dp_replicate") * params.data_parallel_shard + layout.coordinate("dp_shard")


def _degrees(degrees: Mapping[str, object]) -> DeviceMeshParameters:
    try:
        return DeviceMeshParameters.model_validate(degrees)
    except ValidationError as error:
        problems = config_problems(error, DeviceMeshParameters, degrees)
    raise ValueError(f"mesh: {' '.join(problems)}")


def _refuse_bad_entries(written: Mapping[str, object]) -> None:
    """Refuse names that are no degrees, and values that can be none, all at once."""
    known = list(DeviceMeshParameters.model_fields)
    problems: list[str] = []
    for name, degree in written.items():
        if name not in known:
            problems.append(f"{name!r} is no degree.{did_you_mean(name, known)} Valid are {', '.join(known)}.")
        elif degree not in _OPEN and (type(degree) is not int or degree < 1):
            problems.append(f"{name} is {degree!r}: it must be a number of ranks (1 or more), or -1 for what is left.")
    if problems:
        raise ValueError(f"mesh: {' '.join(problems)}")
