"""Configs of the native loops. Each value is checked when the config is read, not at the step that needs it."""

import enum
import math
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

import torch
from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from d9d.checkpoint import OnChangedParameters, OnCorrupt
from d9d.core.config import Config
from d9d.core.module_names import did_you_mean
from d9d.internals.nonfinite import OnNonfinite
from d9d.model_state.io.load import LoadMode
from d9d.pipelining.factory import AnyPipelineScheduleConfig, PipelineScheduleGPipeConfig
from d9d.pipelining.visualize import PICTURE_SUFFIXES
from d9d.tracker import AnyTrackerConfig, RunConfig

__all__ = [
    "BestCheckpointsConfig",
    "CheckpointingConfig",
    "DataPrefetchConfig",
    "DeterminismConfig",
    "GarbageCollectionConfig",
    "GradientClippingConfig",
    "GradientManagerConfig",
    "InferenceConfig",
    "JobLoggerConfig",
    "JobScheduleConfig",
    "LossSpikeConfig",
    "ModelStageFactoryConfig",
    "PipelineTimelineConfig",
    "PipeliningConfig",
    "PreemptionConfig",
    "ProfilingConfig",
    "StepActionPeriod",
    "StepActionSpecial",
    "TimeoutConfig",
    "TrainerConfig",
]


class StepActionSpecial(enum.StrEnum):
    """Names the periods that are not a number of steps."""

    last_step = "last_step"
    """Act on the last step only."""
    disable = "disable"
    """Never act."""


def _check_period(value: object) -> object:
    if isinstance(value, StepActionSpecial) or value in tuple(StepActionSpecial):
        return StepActionSpecial(value)
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    valid = " or ".join(f"'{special}'" for special in StepActionSpecial)
    hint = did_you_mean(value, StepActionSpecial)
    raise ValueError(f"{value!r} is not a period: use a whole number of steps >= 1, {valid}.{hint}")


StepActionPeriod: TypeAlias = Annotated[int | StepActionSpecial, BeforeValidator(_check_period)]
"""Number of steps (at least 1) between two runs of an action, or a `StepActionSpecial`."""

_GRAD_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
    "float64": torch.float64,
    "double": torch.float64,
}


def _check_grad_dtype(value: str) -> str:
    if value not in _GRAD_DTYPES:
        raise ValueError(
            f"{value!r} is not a gradient dtype: use one of {', '.join(_GRAD_DTYPES)}.{did_you_mean(value, _GRAD_DTYPES)}"
        )
    return value


def _check_num_to_keep(value: int) -> int:
    if value < 1:
        raise ValueError(f"num_to_keep ({value}) must be at least 1; leave it out (null) to keep every checkpoint.")
    return value


def _check_max_norm(value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(
            f"max_norm ({value}) must be a finite number above 0; use null to measure the norm without clipping."
        )
    return value


class JobScheduleConfig(Config):
    """Sets how long the job runs."""

    total_steps: int | None = Field(
        default=None, ge=1, description="Number of steps. Default: as many as the data stream reports."
    )


class DataPrefetchConfig(Config):
    """Sets how packs reach the device."""

    prefetch_factor: int = Field(
        default=1,
        ge=0,
        description=(
            "Packs that a background thread reads and copies ahead. Default 1: hides the copy at the memory of one more "
            "pack. 0: copy when the pack is needed, without a thread. So does data that has to be read on the main thread, "
            "as AutoDataProvider's with num_workers 0 or packing (see its seeds_generators)."
        ),
    )


class DataAgreementConfig(Config):
    """Sets when pipeline, context-parallel and tensor-parallel peers compare which sample numbers they ask for."""

    period_steps: StepActionPeriod = Field(
        default=StepActionSpecial.disable,
        description="Steps between comparisons of 16 bytes, which the host waits for. Default: never.",
    )


class DeterminismConfig(Config):
    """Sets the random seeds of the job."""

    base_seed: int = Field(ge=0, lt=2**63, description="Seed that every generator of the job is derived from.")


class PipelineTimelineConfig(Config):
    """Sets when to measure what each pipeline rank does in a step."""

    path: Path = Field(
        description="Picture to write, .svg or .html. The measurements go beside it as .json, for python -m d9d pipeline."
    )
    step: int = Field(
        default=3,
        ge=1,
        description="Step to measure, from 1. Default 3: the first ones allocate. The host waits for each action then.",
    )

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: Path) -> Path:
        if path.suffix not in PICTURE_SUFFIXES:
            raise ValueError(f"path ({path}) must end in {' or '.join(PICTURE_SUFFIXES)}.")
        return path


class PipeliningConfig(Config):
    """Sets how the microbatches of a pack run through the stages."""

    schedule: AnyPipelineScheduleConfig = Field(
        default_factory=PipelineScheduleGPipeConfig,
        description="Pipeline schedule. Without pipeline parallelism, all of them run one microbatch after another.",
    )
    timeline: PipelineTimelineConfig | None = Field(
        default=None, description="Measure one step of the first replica and draw it. Default: no measurement."
    )


class GarbageCollectionConfig(Config):
    """Sets when Python's cycle collector runs, at the same steps on every rank."""

    period_steps: StepActionPeriod = Field(description="Steps between two collections of the younger generations.")


class BestCheckpointsConfig(Config):
    """Sets which checkpoints are kept for the value of a metric."""

    metric: str = Field(
        min_length=1,
        description="Name under which the value is logged: 'loss', a metric of the task, or what is written to the tracker.",
    )
    mode: Literal["min", "max"] = Field(description="Whether small or large values are good.")
    num_to_keep: int = Field(default=1, ge=1, description="How many checkpoints. Default: the best one.")


class CheckpointingConfig(Config):
    """Sets where and when training checkpoints are written."""

    save_dir: Path = Field(description="Folder of checkpoints; those of a run are in a subfolder of the run's name.")
    period_steps: StepActionPeriod = Field(
        description="Steps between two checkpoints. A numeric period also saves on the last step."
    )
    num_to_keep: Annotated[int, AfterValidator(_check_num_to_keep)] | None = Field(
        default=None, description="Newest checkpoints to keep, at least 1. Default: all."
    )
    keep_every_steps: int | None = Field(
        default=None,
        ge=1,
        description="Keep checkpoints whose step is a multiple of this, beside the newest ones. Default: none of them.",
    )
    async_save: bool = Field(
        default=False,
        description="Write in the background: a step waits only while its state is copied to the host, which takes as much "
        "host memory as a rank's part of a checkpoint. Default: false, which needs no such memory.",
    )
    timeout: float = Field(
        default=3600,
        gt=0,
        description="Seconds that ranks wait for the slowest of them to write or read its part. Default: an hour, since the "
        "limit of a step is too short for large checkpoints on slow disks.",
    )
    on_corrupt: OnCorrupt = Field(
        default="raise",
        description="What to do where the newest checkpoint is damaged: 'raise' refuses to start, 'fallback' takes the newest "
        "intact one. Default: raise, since steps that were done get lost otherwise.",
    )
    on_changed_parameters: OnChangedParameters = Field(
        default="raise",
        description="What to do where the model has parameters that the checkpoint lacks, or lacks some that it holds: 'raise' "
        "refuses to resume, 'allow' keeps the first values of new ones and leaves out old ones, and tells which. Default: "
        "raise, since a name that has changed would lose what was trained.",
    )
    on_save_failure: Literal["raise", "continue"] = Field(
        default="raise",
        description="What to do where the system refuses to write a checkpoint, such as on a full disk: 'raise' ends the job, "
        "'continue' tells, trains on and tries again at the next one. The last one of a job must be written either way. "
        "Default: raise, since a job that nobody looks at would train on without any.",
    )
    max_restarts_without_progress: int = Field(
        default=3,
        ge=0,
        description="Restarts in a row by torchrun --max-restarts that may find no newer checkpoint than the attempt before. "
        "Default 3: a machine may fail twice, a job that fails at one place each time has to be mended.",
    )
    on_best: BestCheckpointsConfig | None = Field(
        default=None,
        description="Keep the checkpoints with the best values of a metric, beside the newest ones. A checkpoint has the "
        "value that was logged last since the one before it. Default: only the newest ones are kept.",
    )
    share_with_group: bool = Field(
        default=False,
        description="Let the group of the user read and write new folders of checkpoints. Default: only the user.",
    )

    @model_validator(mode="after")
    def _check_on_best(self) -> Self:
        if self.on_best is not None and self.num_to_keep is None:
            raise ValueError("on_best keeps checkpoints that num_to_keep would remove: set num_to_keep as well.")
        return self


class LossSpikeConfig(Config):
    """Sets which losses stand out, for handlers of the event ``train.loss_spike``."""

    num_deviations: float = Field(
        default=6.0,
        gt=0,
        description="Deviations above the median of the last losses, where a deviation is 1.4826 times the median distance "
        "from the median. Default 6: noise comes there once in 10^9 steps, if it is normal.",
    )
    window_steps: int = Field(
        default=100, ge=3, description="Losses to compare with. Default 100: the first 100 steps are not judged."
    )


class ModelStageFactoryConfig(Config):
    """Sets what model stages start from and what of them is saved."""

    source_checkpoint: Path | None = Field(
        default=None,
        description="Folder of a model state, or a .safetensors file, to load. Default: keep the initialized parameters.",
    )
    load_mode: LoadMode = Field(
        default="each",
        description='"each" rank reads its shards. "broadcast": of ranks that hold the same shard one reads and sends it to '
        "the others, where the network is faster than the storage. Default: no communication.",
    )
    checkpoint_only_trainable_parameters: bool = Field(
        default=False,
        description="Leave parameters that were never trained out of training checkpoints. Default: a checkpoint is complete.",
    )


class GradientClippingConfig(Config):
    """Sets the largest global gradient norm."""

    max_norm: Annotated[float, AfterValidator(_check_max_norm)] | None = Field(
        description="Norm that gradients are scaled down to, above 0; null measures the norm and leaves them alone."
    )


class ProfilingConfig(Config):
    """Sets when steps are traced."""

    traces_dir: Path = Field(description="Folder of traces, one subfolder per traced step.")
    period_steps: int = Field(gt=0, description="Steps of one cycle of waiting, warming up and tracing.")
    warmup_steps: int = Field(ge=0, description="Steps before tracing with the profiler on, which are not written.")
    active_steps: int = Field(gt=0, description="Steps that a trace holds.")
    record_shapes: bool = Field(default=True, description="Record input shapes of operators. Default: worth its cost.")
    with_stack: bool = Field(default=True, description="Record Python stacks of operators. Default: worth its cost.")

    @model_validator(mode="after")
    def _check_cycle(self) -> Self:
        used = self.warmup_steps + self.active_steps
        if used > self.period_steps:
            raise ValueError(
                f"warmup_steps + active_steps ({self.warmup_steps} + {self.active_steps} = {used}) must fit into "
                f"period_steps ({self.period_steps}): raise period_steps to {used} or more."
            )
        return self


class JobLoggerConfig(Config):
    """Sets what is written to the experiment tracker, and when."""

    period_steps: StepActionPeriod = Field(
        description="Steps between two writes of loss, gradient norm and metrics. A number also writes on the last step."
    )
    tracker: AnyTrackerConfig = Field(description="Experiment tracker.")
    max_pending_steps: int = Field(
        default=2,
        gt=0,
        description=(
            "Steps that a logged value may wait on the device before the host reads it. Default 2: the host reads what "
            "was computed two steps ago, and does not wait for the device."
        ),
    )


class GradientManagerConfig(Config):
    """Sets how gradients are stored and summed."""

    grad_dtype: Annotated[str, AfterValidator(_check_grad_dtype)] | None = Field(
        default=None, description="Dtype that gradients are accumulated in. Default: that of each parameter."
    )
    bucket_size_mb: int = Field(
        default=32,
        ge=1,
        description="Size in MiB of the buffers that are summed at once. Default 32: large enough to fill a network link.",
    )
    fsdp_keep_sharded: bool = Field(
        default=False,
        description=(
            "Sum and free after every microbatch under FSDP, instead of once per step. Default False: fewer "
            "collectives, for the memory of full parameters and gradients while a step of several microbatches runs."
        ),
    )
    on_zero_weight: Literal["skip", "raise"] = Field(
        default="skip",
        description=(
            "What a step does when the loss weights of all microbatches on all ranks are 0. Default 'skip': leave the "
            "weights as they are and go on; 'raise' ends the job."
        ),
    )
    on_nonfinite: OnNonfinite = Field(
        default="ignore",
        description=(
            "What a step does when its loss or gradient norm is NaN or infinite on any rank: 'skip' leaves weights and optimizer "
            "as they are and goes on, 'raise' ends the job before they change. Both let the host wait for the device once a "
            "step. Default 'ignore': take the step without looking."
        ),
    )

    @property
    def torch_grad_dtype(self) -> torch.dtype | None:
        """The dtype that `grad_dtype` names."""
        return None if self.grad_dtype is None else _GRAD_DTYPES[self.grad_dtype]


class TimeoutConfig(Config):
    """Sets how long a collective may take before the job fails."""

    init_timeout: int = Field(
        default=10000,
        ge=1,
        description="Limit in seconds until the first step is done. Default 10000: ranks may load data and weights.",
    )
    step_timeout: int = Field(
        default=100,
        ge=1,
        description="Limit in seconds from the second step on. Default 100: a hang ends the job soon.",
    )


class PreemptionConfig(Config):
    """Sets which signals tell a job to save and end."""

    signals: tuple[Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP"], ...] = Field(
        default=("SIGTERM", "SIGUSR1"),
        description="Signals after which all ranks finish their step, save a checkpoint and exit with 128 plus the number of "
        "the signal. Default: those that schedulers send. []: they have their usual effect.",
    )


class TrainerConfig(Config):
    """Sets everything about a training job that is not code."""

    run: RunConfig = Field(description="Name and description of the run.")
    schedule: JobScheduleConfig = Field(default_factory=JobScheduleConfig)
    data_prefetch: DataPrefetchConfig = Field(default_factory=DataPrefetchConfig)
    data_agreement: DataAgreementConfig = Field(default_factory=DataAgreementConfig)
    logging: JobLoggerConfig
    pipelining: PipeliningConfig = Field(default_factory=PipeliningConfig)
    model_stage_factory: ModelStageFactoryConfig = Field(default_factory=ModelStageFactoryConfig)
    determinism: DeterminismConfig
    gc: GarbageCollectionConfig
    checkpointing: CheckpointingConfig
    gradient_clipping: GradientClippingConfig
    profiling: ProfilingConfig | None = Field(default=None, description="Default: no traces.")
    gradient_manager: GradientManagerConfig = Field(default_factory=GradientManagerConfig)
    loss_spike: LossSpikeConfig | None = Field(default=None, description="Default: no loss is looked at.")
    timeout: TimeoutConfig = Field(default_factory=TimeoutConfig)
    preemption: PreemptionConfig = Field(default_factory=PreemptionConfig)


class InferenceConfig(Config):
    """Sets everything about an inference job that is not code."""

    schedule: JobScheduleConfig = Field(default_factory=JobScheduleConfig)
    data_prefetch: DataPrefetchConfig = Field(default_factory=DataPrefetchConfig)
    data_agreement: DataAgreementConfig = Field(default_factory=DataAgreementConfig)
    model_stage_factory: ModelStageFactoryConfig = Field(default_factory=ModelStageFactoryConfig)
    determinism: DeterminismConfig
    gc: GarbageCollectionConfig
    checkpointing: CheckpointingConfig
    profiling: ProfilingConfig | None = Field(default=None, description="Default: no traces.")
    timeout: TimeoutConfig = Field(default_factory=TimeoutConfig)
