"""Configs of the loops: what is accepted, and that each bad value is refused with what would be good."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel, TypeAdapter, ValidationError

from d9d.loop.auto import AutoDataConfig
from d9d.loop.config import (
    CheckpointingConfig,
    DataPrefetchConfig,
    DeterminismConfig,
    GarbageCollectionConfig,
    GradientClippingConfig,
    GradientManagerConfig,
    InferenceConfig,
    JobLoggerConfig,
    JobScheduleConfig,
    ProfilingConfig,
    StepActionPeriod,
    StepActionSpecial,
    TimeoutConfig,
    TrainerConfig,
)

NULL_TRACKER = {"provider": "null"}
PROFILING = {"traces_dir": "t", "period_steps": 10, "warmup_steps": 2, "active_steps": 3}
LOGGING = {"period_steps": 1, "tracker": NULL_TRACKER}
CHECKPOINTING = {"save_dir": "c", "period_steps": 5}
DATA = {"global_batch_size": 8, "microbatch_size": 2, "num_workers": 0}

TRAINER = {
    "run": {"name": "run"},
    "logging": LOGGING,
    "determinism": {"base_seed": 1},
    "gc": {"period_steps": "disable"},
    "checkpointing": CHECKPOINTING,
    "gradient_clipping": {"max_norm": None},
}


def test_a_trainer_config_needs_only_what_has_no_default():
    config = TrainerConfig.model_validate(TRAINER)
    assert config.schedule.total_steps is None
    assert config.data_prefetch.prefetch_factor == 1
    assert config.pipelining.schedule.schedule == "gpipe"
    assert config.profiling is None
    assert (config.timeout.init_timeout, config.timeout.step_timeout) == (10000, 100)
    assert (config.gradient_manager.grad_dtype, config.gradient_manager.bucket_size_mb) == (None, 32)
    assert config.checkpointing.save_dir == Path("c")
    assert config.logging.max_pending_steps == 2


@pytest.mark.parametrize("missing", TRAINER)
def test_each_required_part_of_a_trainer_config_is_missed(missing):
    with pytest.raises(ValidationError, match=missing):
        TrainerConfig.model_validate({name: value for name, value in TRAINER.items() if name != missing})


def test_an_inference_config_has_no_run_and_no_logging():
    parts = {name: TRAINER[name] for name in ("determinism", "gc", "checkpointing")}
    InferenceConfig.model_validate(parts)
    with pytest.raises(ValidationError, match="run"):
        InferenceConfig.model_validate({**parts, "run": {"name": "run"}})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1),
        ("10", 10),
        ("last_step", StepActionSpecial.last_step),
        (StepActionSpecial.disable, StepActionSpecial.disable),
    ],
)
def test_periods(value, expected):
    assert TypeAdapter(StepActionPeriod).validate_python(value) == expected


@pytest.mark.parametrize("value", [0, -5, True, 1.5, "never", None, [1]])
def test_other_periods_are_refused_with_the_valid_ones(value):
    with pytest.raises(ValidationError, match="whole number of steps >= 1, 'last_step' or 'disable'") as error:
        TypeAdapter(StepActionPeriod).validate_python(value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (GarbageCollectionConfig, {"period_steps": 0}, "0 is not a period"),
        (CheckpointingConfig, {**CHECKPOINTING, "period_steps": -5}, "-5 is not a period"),
        (CheckpointingConfig, {**CHECKPOINTING, "num_to_keep": -1}, r"num_to_keep \(-1\) must be at least 1"),
        (CheckpointingConfig, {**CHECKPOINTING, "num_to_keep": 0}, "to keep every checkpoint"),
        (GradientClippingConfig, {"max_norm": -1}, r"max_norm \(-1.0\) must be a finite number above 0"),
        (GradientClippingConfig, {"max_norm": 0}, "use null to measure"),
        (GradientClippingConfig, {"max_norm": float("nan")}, "finite"),
        (GradientClippingConfig, {"max_norm": float("inf")}, "finite"),
        (GradientClippingConfig, {}, "Field required"),
        (GradientManagerConfig, {"grad_dtype": "flot32"}, "'flot32' is not a gradient dtype: use one of bfloat16"),
        (GradientManagerConfig, {"grad_dtype": "int32"}, "'int32' is not a gradient dtype"),
        (GradientManagerConfig, {"bucket_size_mb": 0}, "greater than or equal to 1"),
        (GradientManagerConfig, {"on_zero_weight": "ignore"}, "'skip' or 'raise'"),
        (JobScheduleConfig, {"total_steps": 0}, "greater than or equal to 1"),
        (DataPrefetchConfig, {"prefetch_factor": -1}, "greater than or equal to 0"),
        (DeterminismConfig, {"base_seed": -1}, "greater than or equal to 0"),
        (TimeoutConfig, {"init_timeout": -1}, "greater than or equal to 1"),
        (TimeoutConfig, {"step_timeout": 0}, "greater than or equal to 1"),
        (JobLoggerConfig, {**LOGGING, "max_pending_steps": 0}, "greater than 0"),
        (ProfilingConfig, {**PROFILING, "period_steps": 4}, r"\(2 \+ 3 = 5\) must fit into period_steps \(4\)"),
        (ProfilingConfig, {**PROFILING, "active_steps": 0}, "greater than 0"),
        (AutoDataConfig, {**DATA, "global_batch_size": 0}, "greater than or equal to 1"),
        (AutoDataConfig, {**DATA, "microbatch_size": 0}, "greater than or equal to 1"),
        (AutoDataConfig, {**DATA, "microbatch_size": 3}, r"\(8\) is not a multiple of microbatch_size \(3\)"),
        (AutoDataConfig, {**DATA, "num_workers": -1}, "greater than or equal to 0"),
        (AutoDataConfig, {**DATA, "persistent_workers": True}, "persistent_workers .* needs num_workers >= 1"),
        (AutoDataConfig, {**DATA, "prefetch_factor": 2, "timeout": 3}, r"prefetch_factor \(2\).*; timeout \(3.0\)"),
        (AutoDataConfig, {**DATA, "num_epochs": 0}, "greater than or equal to 1"),
    ],
)
def test_a_bad_value_is_refused(config: type[BaseModel], values: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        config.model_validate(values)


def test_unknown_fields_are_refused():
    with pytest.raises(ValidationError, match="total_stepz"):
        TrainerConfig.model_validate({**TRAINER, "schedule": {"total_stepz": 5}})


@pytest.mark.parametrize(
    ("name", "dtype"), [(None, None), ("float32", torch.float32), ("bfloat16", torch.bfloat16), ("half", torch.float16)]
)
def test_the_gradient_dtype_that_a_name_means(name, dtype):
    assert GradientManagerConfig(grad_dtype=name).torch_grad_dtype == dtype
