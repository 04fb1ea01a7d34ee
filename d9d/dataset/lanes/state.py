"""The saved position of a run in its data, and which changes a resumed run may make."""

import dataclasses
from typing import Any

from d9d.dataset.lanes.order import Tail
from d9d.dataset.lanes.permutation import ORDER_VERSION
from d9d.dataset.lanes.plan import DataPlan
from d9d.dataset.lanes.schedule import BatchSchedule, RampPoint, StepRange

__all__ = ["STATE_VERSION", "LaneState", "check_resume"]

STATE_VERSION = 1

_KEYS_OF_ALL_VERSIONS = {"version", "order"}

_Value = int | str | bool

_SETTINGS = {"num_lanes": "lanes", "num_chunks": "shard_indexing_mode", "recipe": "mixture and packing"}
"""What users set, for values of a state that go by another name."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaneState:
    """Holds the position in the data and all that it depends on; the same on every rank, well below 1 KiB.

    Attributes:
        version: Version of this format.
        order: Version of the permutations.
        num_samples: Samples of the dataset.
        seed: Seed of the shuffle.
        shuffle: Whether epochs are shuffled.
        tail: What happens at the end of an epoch.
        schedule: Global batch sizes and skipped steps, of the steps that were done and of those that were planned.
        microbatch_size: Samples per microbatch.
        num_lanes: Number of lanes.
        num_chunks: Number of blocks that are read in parallel, or 0.
        num_steps: Steps that were trained on. What was only read ahead does not count.
        consumed: Position behind the last of these steps, in samples over all ranks.
        fingerprint: Of the dataset; empty if it was not taken.
        recipe: How elements are made of samples, if they are not the samples themselves, such as sizes of a packer.
    """

    version: int = STATE_VERSION
    order: str = ORDER_VERSION
    num_samples: int
    seed: int
    shuffle: bool
    tail: Tail
    schedule: BatchSchedule
    microbatch_size: int
    num_lanes: int
    num_chunks: int = 0
    num_steps: int
    consumed: int
    fingerprint: str = ""
    recipe: str = ""

    @classmethod
    def of(cls, plan: DataPlan, num_steps: int, fingerprint: str, recipe: str = "") -> "LaneState":
        """Describe a run after some steps.

        Args:
            plan: Plan of the run.
            num_steps: Steps that were trained on.
            fingerprint: Of the dataset; empty for none.
            recipe: How elements are made of samples.
        """
        return cls(
            num_samples=plan.num_samples,
            seed=plan.seed,
            shuffle=plan.shuffle,
            tail=plan.tail,
            schedule=plan.schedule,
            microbatch_size=plan.microbatch_size,
            num_lanes=plan.num_lanes,
            num_chunks=plan.num_chunks,
            num_steps=num_steps,
            consumed=plan.schedule.consumed(num_steps),
            fingerprint=fingerprint,
            recipe=recipe,
        )

    def to_dict(self) -> dict[str, _Value]:
        """Return the state as numbers and strings under flat names."""
        return {
            "version": self.version,
            "order": self.order,
            "num_samples": self.num_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "tail": self.tail.value,
            "global_batch_size": _ramp_to_text(self.schedule.ramp),
            "skip_steps": ",".join(f"{skip.start}-{skip.stop}" for skip in self.schedule.skips),
            "microbatch_size": self.microbatch_size,
            "num_lanes": self.num_lanes,
            "num_chunks": self.num_chunks,
            "num_steps": self.num_steps,
            "consumed": self.consumed,
            "fingerprint": self.fingerprint,
            "recipe": self.recipe,
        }

    # `Any`: what a checkpoint holds may be of any type until it has been looked at.
    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LaneState":
        """Read what `to_dict` returned.

        Raises:
            ValueError: Values are missing or do not fit together, or another version wrote them.
        """
        if not values.keys() >= _KEYS_OF_ALL_VERSIONS:
            raise ValueError(
                f"the saved data position ({', '.join(sorted(map(str, values)))}) is not one of this stream: its samples came "
                "in another order, or from another data provider. Resume with what saved it, or start a new run."
            )
        version = values["version"]
        if version != STATE_VERSION:
            raise ValueError(
                f"the saved data position has format version {version}, and this release reads {STATE_VERSION}: resume "
                "with the release that saved it, or start a new run."
            )
        try:
            state = _parse(values)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the saved data position cannot be read: {error!r} in {values}.") from error
        expected = state.schedule.consumed(state.num_steps)
        if state.consumed != expected:
            raise ValueError(
                f"the saved data position contradicts itself: {state.num_steps} steps end at sample {expected}, not "
                f"{state.consumed}."
            )
        return state


def check_resume(saved: LaneState, own: LaneState, *, lanes_hold_state: bool = False) -> None:
    """Refuse to resume if the saved position would mean other samples now.

    Any number of ranks that divides the lanes, any number of loader processes, another microbatch size, and with
    `Tail.wrap` other batch sizes for the steps to come are allowed.

    Args:
        saved: State from the checkpoint.
        own: State of this run before its first step.
        lanes_hold_state: Whether each lane has a state of its own, so that their number must stay.

    Raises:
        ValueError: Names every value that must not change, with the saved and the current one, and every range of
            `skip_steps` that comes too late.
    """
    before, now = saved.to_dict(), own.to_dict()
    names = ["order", "num_samples", "seed", "shuffle", "tail", "num_chunks", "recipe"]
    if Tail.wrap not in (saved.tail, own.tail):
        names.append("global_batch_size")
    if saved.fingerprint and own.fingerprint:
        names.append("fingerprint")
    if lanes_hold_state:
        names.append("num_lanes")
    changes = [
        f"{_SETTINGS.get(name, name)} (checkpoint: {_told(name, before[name])}, now: {_told(name, now[name])})"
        for name in names
        if before[name] != now[name]
    ]
    problems: list[str] = []
    if changes:
        problems.append(
            f"the data stream cannot resume, since its position would mean other samples. Changed: {', '.join(changes)}. "
            "Restore the saved values, or start a new run."
        )
    late = [
        str(skip) for skip in own.schedule.skips if skip.start < saved.num_steps and skip not in saved.schedule.skips
    ]
    if late:
        problems.append(
            f"skip_steps ({', '.join(late)}) come too late: {saved.num_steps} steps are done. Resume from a checkpoint "
            "before them, or remove them."
        )
    if problems:
        raise ValueError(" ".join(problems))


def _told(name: str, value: _Value) -> str:
    """Return a value in the words of the settings that it comes from."""
    match name:
        case "num_chunks":
            return f"chunked over {value} lanes" if value else "sequential"
        case "recipe":
            return str(value) or "none"
        case _:
            return str(value)


def _parse(values: dict[str, Any]) -> LaneState:
    skips = (item.split("-") for item in values["skip_steps"].split(",") if item)
    return LaneState(
        order=str(values["order"]),
        num_samples=int(values["num_samples"]),
        seed=int(values["seed"]),
        shuffle=bool(values["shuffle"]),
        tail=Tail(values["tail"]),
        schedule=BatchSchedule(
            ramp=_ramp_from_text(values["global_batch_size"]),
            skips=tuple(StepRange(int(start), int(stop)) for start, stop in skips),
        ),
        microbatch_size=int(values["microbatch_size"]),
        num_lanes=int(values["num_lanes"]),
        num_chunks=int(values["num_chunks"]),
        num_steps=int(values["num_steps"]),
        consumed=int(values["consumed"]),
        fingerprint=str(values["fingerprint"]),
        recipe=str(values["recipe"]),
    )


def _ramp_to_text(ramp: tuple[RampPoint, ...]) -> str:
    """Write 8 from the start and 16 from step 100 on as "8,100:16"."""
    first, *others = ramp
    return ",".join([str(first.global_batch_size), *(f"{step}:{size}" for step, size in others)])


def _ramp_from_text(text: str) -> tuple[RampPoint, ...]:
    first, *others = text.split(",")
    points = (item.split(":") for item in others)
    return (RampPoint(0, int(first)), *(RampPoint(int(step), int(size)) for step, size in points))
