"""Names of strategies, for ``Trainer(strategy="d9d_tp2_fsdp")``, config files and command lines."""

import dataclasses
import itertools
import re
from typing import Any, Self

from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

from d9d.core.module_names import did_you_mean
from d9d_lightning.options.schedule import TRAINING_SCHEDULES
from d9d_lightning.strategy import D9DStrategy

__all__ = ["StrategyName", "register", "register_grid"]

_PREFIX = D9DStrategy.strategy_name
_DEGREES = {
    "pp": "pipeline_parallel",
    "rep": "data_parallel_replicate",
    "shard": "data_parallel_shard",
    "tp": "tensor_parallel",
}
_WORD = re.compile(
    rf"_({'|'.join(map(re.escape, sorted(TRAINING_SCHEDULES, key=len, reverse=True)))}|fsdp|(?:{'|'.join(_DEGREES)}|mb)[1-9][0-9]*)(?=_|$)"
)
_GRID = (2, 4, 8)
"""Degrees of tensor and pipeline parallelism whose names are known from the start."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StrategyName:
    """What the name of a strategy says.

    A name is ``d9d`` and any of these words, joined by underscores: ``pp<N>``, ``tp<N>``, ``shard<N>`` and ``rep<N>``,
    the degrees; ``mb<N>``, the number of microbatches; a schedule; and ``fsdp``. With ``fsdp`` the parameters are
    sharded over the processes that the degrees leave, and otherwise replicated.
    """

    full: str
    """The whole name, with ``d9d``."""
    options: dict[str, Any]  # of the constructor
    """Arguments of `D9DStrategy`."""

    @classmethod
    def parse(cls, name: str) -> Self:
        """Read a name.

        Args:
            name: With or without ``d9d`` in front, in upper or lower case.

        Raises:
            ValueError: If it has an unknown word, or one of them twice.
        """
        lowered = name.lower()
        full = lowered if lowered == _PREFIX or lowered.startswith(f"{_PREFIX}_") else f"{_PREFIX}_{lowered}"
        options: dict[str, Any] = {}
        mesh: dict[str, int] = {}
        seen: list[str] = []
        rest = full.removeprefix(_PREFIX)
        while rest:
            match = _WORD.match(rest)
            if match is None:
                raise ValueError(
                    f"strategy {name!r}: {rest.removeprefix('_')!r} is not understood. A name is made of "
                    f"{', '.join(f'{word}<N>' for word in _DEGREES)}, mb<N>, fsdp and a schedule ("
                    f"{', '.join(TRAINING_SCHEDULES)}), joined by underscores, as in d9d_pp2_tp4_mb8.{_meant(rest)}"
                )
            rest = rest[match.end() :]
            word, number = _split(match.group(1))
            seen.append(word)
            if word in _DEGREES:
                mesh[_DEGREES[word]] = number
            elif word == "mb":
                options["microbatches"] = number
            elif word == "schedule":
                options["schedule"] = match.group(1)
        twice = sorted({word for word in seen if seen.count(word) > 1})
        rest_degree = "data_parallel_shard" if "fsdp" in seen else "data_parallel_replicate"
        if "fsdp" in seen and "shard" in seen:
            twice.append("fsdp beside shard")
        if twice:
            raise ValueError(f"strategy {name!r} says one thing twice: {', '.join(twice)}.")
        return cls(full=full, options={"mesh": {rest_degree: -1} | mesh, **options})


def _meant(rest: str) -> str:
    """Ask whether the next word is another one, with its number."""
    word = rest.removeprefix("_").partition("_")[0]
    letters = word.rstrip("0123456789")
    number = word.removeprefix(letters)
    numbered = [f"{known}{number}" for known in (*_DEGREES, "mb")] if number else []
    return did_you_mean(word, [*numbered, "fsdp", *TRAINING_SCHEDULES])


def _split(word: str) -> tuple[str, int]:
    if word in TRAINING_SCHEDULES:
        return "schedule", 0
    letters = word.rstrip("0123456789")
    return letters, int(word.removeprefix(letters) or 0)


# `Any`: the constructor's own arguments.
def register(name: str, **options: Any) -> str:
    """Make a strategy known to Lightning by a name that says its mesh, and return the whole name.

    ``register("pp2_tp4_mb8", pipeline_module="model")`` is ``Trainer(strategy="d9d_pp2_tp4_mb8")`` from then on. A name
    that is known already gets the new options.

    Args:
        name: See `StrategyName`.
        options: Further arguments of `D9DStrategy`, which win over those of the name.

    Raises:
        ValueError: If the name is not understood.
    """
    parsed = StrategyName.parse(name)
    StrategyRegistry.register(
        parsed.full,
        D9DStrategy,
        description=f"d9d, {parsed.options}",
        override=True,
        **{**parsed.options, **options},
    )
    return parsed.full


class _KnownNames(list[str]):
    """Names of strategies; those of d9d that are not known yet become so when they are asked for.

    [Note: names that Lightning asks for]
    A Trainer looks a name up in the list of all names, and refuses what is not there without a word about d9d. So this list
    stands in for the registry's own: any name that can be understood is registered, and any other is refused with the reason.
    """

    @override
    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        if not isinstance(name, str) or re.match(rf"{_PREFIX}(_|$)", name) is None:
            return False
        register(name)
        return name in StrategyRegistry


def _known_names() -> list[str]:
    return _KnownNames(StrategyRegistry)


def register_grid() -> None:
    """Make the common meshes known: tensor and pipeline degrees of 2, 4 and 8, each replicated and sharded."""
    tensor = ["", *(f"_tp{degree}" for degree in _GRID)]
    pipeline = ["", *(f"_pp{degree}" for degree in _GRID)]
    for first, second, last in itertools.product(pipeline, tensor, ("", "_fsdp")):
        register(f"{_PREFIX}{first}{second}{last}")


register_grid()
# Lightning has no hook for names that it does not know. [Note: names that Lightning asks for]
StrategyRegistry.available_strategies = _known_names
