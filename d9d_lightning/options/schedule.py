"""The pipeline schedule as users write it: a name, the fields of a config, or a config."""

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from pydantic import BaseModel, TypeAdapter, ValidationError

from d9d.core.config import config_problems
from d9d.core.module_names import did_you_mean
from d9d.pipelining.factory import AnyPipelineScheduleConfig
from d9d.pipelining.schedules import SCHEDULE_NAMES

__all__ = ["TRAINING_SCHEDULES", "ScheduleSpec", "schedule_config", "schedule_option_problems"]

# `Any`: fields of the configs, which pydantic checks.
ScheduleSpec: TypeAlias = str | Mapping[str, Any] | AnyPipelineScheduleConfig
"""A pipeline schedule: its name, its config from `d9d.pipelining.factory`, or the fields of the config."""

_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "interleaved": {"schedule": "1f1b", "num_stages_per_rank": 2},
    "zero_bubble": {"schedule": "1f1b", "zero_bubble": True},
}
"""Names for variants of other schedules."""

TRAINING_SCHEDULES = (*(name for name in SCHEDULE_NAMES if name != "inference"), *_VARIANTS)
"""Names of the schedules that train."""

_CONFIGS: TypeAdapter[AnyPipelineScheduleConfig] = TypeAdapter(AnyPipelineScheduleConfig)


def schedule_config(spec: ScheduleSpec) -> AnyPipelineScheduleConfig:
    """Return the config of a schedule.

    Raises:
        pydantic.ValidationError: See `schedule_option_problems`.
    """
    if isinstance(spec, str):
        spec = _VARIANTS.get(spec, {"schedule": spec})
    return _CONFIGS.validate_python(dict(spec) if isinstance(spec, Mapping) else spec)


def schedule_option_problems(spec: object) -> list[str]:
    """Say what is wrong with a schedule."""
    valid = ", ".join(TRAINING_SCHEDULES)
    if not isinstance(spec, str | Mapping | BaseModel):
        return [f"schedule ({spec!r}) must be a name ({valid}), the fields of a schedule config, or such a config."]
    name = spec if isinstance(spec, str) else dict(spec).get("schedule")
    if name == "inference":
        return [f"schedule (inference) runs no backward passes. Choose {valid}; validation runs forward passes only."]
    is_variant = name in _VARIANTS and isinstance(spec, str)
    if name not in SCHEDULE_NAMES and not is_variant:
        return [f"schedule {name!r} is not known: choose {valid}.{did_you_mean(name, TRAINING_SCHEDULES)}"]
    try:
        schedule_config(cast("ScheduleSpec", spec))
    except ValidationError as error:
        return [
            f"schedule {name}: {text.removesuffix('.')}."
            for text in config_problems(error, AnyPipelineScheduleConfig, spec)
        ]
    return []
