"""A small job for tests of the training loop, and the same arithmetic in plain PyTorch."""

import dataclasses
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import nn
from torch.utils.data import Dataset

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.internals.materialize import materialize_module
from d9d.loop.auto import (
    AutoDataConfig,
    AutoDataProvider,
    AutoLRSchedulerConfig,
    AutoLRSchedulerProvider,
    AutoOptimizerConfig,
    AutoOptimizerProvider,
)
from d9d.loop.config import TrainerConfig
from d9d.loop.control import (
    BuildForwardInputsContext,
    BuildForwardInputsResult,
    ComputeLossContext,
    ComputeLossResult,
    CreateMetricsContext,
    CreateMetricsResult,
    DataProvider,
    InitializeModelStageContext,
    InitializeModelStageResult,
    ModelProvider,
    OptimizerProvider,
    ParallelizeModelStageContext,
    TrainTask,
    UpdateMetricsContext,
)
from d9d.loop.run import Trainer, TrainingConfigurator
from d9d.metric.impl.aggregation import SumMetric
from d9d.model_state.mapper.adapters import identity_mapper_from_module
from d9d.module.parallelism.api import parallelize_hsdp

NUM_FEATURES = 6
GLOBAL_BATCH_SIZE = 16
NUM_SAMPLES = GLOBAL_BATCH_SIZE * 30
BASE_SEED = 7


@dataclasses.dataclass
class Batch:
    index: torch.Tensor
    x: torch.Tensor
    y: torch.Tensor


class Data(Dataset[Batch]):
    """Samples that carry their index, so that tests can compare what was read."""

    def __init__(self, num_samples: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(num_samples, NUM_FEATURES, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randn(num_samples, 1, generator=generator, dtype=torch.float64).to(dtype)

    def __getitem__(self, index: int) -> Batch:
        return Batch(torch.tensor(index), self.x[index], self.y[index])

    def __len__(self) -> int:
        return len(self.x)


def collate(samples: Sequence[Batch]) -> Batch:
    return Batch(*(torch.stack(parts) for parts in zip(*map(dataclasses.astuple, samples), strict=True)))


class Model(nn.Module):
    """Odd sizes, so that shards are uneven."""

    def __init__(self, dtype: torch.dtype, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(NUM_FEATURES, 9, dtype=dtype)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(9, 1, dtype=dtype)
        self.scale = nn.Parameter(torch.empty(3, dtype=dtype))

    def forward(self, inputs: torch.Tensor, shared: None) -> torch.Tensor:
        return self.down(self.dropout(torch.tanh(self.up(inputs)))) * self.scale.prod()

    def reset_parameters(self) -> None:
        self.up.reset_parameters()
        self.down.reset_parameters()
        nn.init.uniform_(self.scale, 0.5, 1.5)


class Provider(ModelProvider[Model]):
    def __init__(self, dtype: torch.dtype, dropout: float) -> None:
        self._dtype = dtype
        self._dropout = dropout

    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[Model]:
        model = Model(self._dtype, self._dropout)
        return InitializeModelStageResult(model=model, state_mapper=identity_mapper_from_module(model))

    def parallelize_model_stage(self, context: ParallelizeModelStageContext[Model]) -> None:
        mesh = context.dist_context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard", "cp_replicate"]
        parallelize_hsdp(context.model.up, mesh)
        parallelize_hsdp(context.model, mesh)


WeightFn = Callable[[torch.Tensor], torch.Tensor | None]
"""Gives the loss weight of a microbatch from the indices of its samples."""


def unweighted(index: torch.Tensor) -> None:
    return None


class Task(TrainTask[Batch, torch.Tensor, None, torch.Tensor, Batch]):
    def __init__(self, weight: WeightFn) -> None:
        self._weight = weight
        self.read: list[list[int]] = []

    def build_forward_inputs(
        self, ctx: BuildForwardInputsContext[Batch]
    ) -> BuildForwardInputsResult[torch.Tensor, None, Batch]:
        self.read.append(ctx.batch.index.tolist())
        return BuildForwardInputsResult(input=ctx.batch.x, shared=None, state=ctx.batch)

    def compute_loss(self, ctx: ComputeLossContext[torch.Tensor, Batch]) -> ComputeLossResult:
        loss = F.mse_loss(ctx.pipeline_results, ctx.state.y)
        weight = self._weight(ctx.state.index)
        if weight is not None and weight == 0:
            # What a masked mean does when everything is masked.
            loss = (loss * 0.0) / 0.0
        return ComputeLossResult(loss=loss, loss_weight=weight)

    def create_metrics(self, ctx: CreateMetricsContext) -> CreateMetricsResult:
        return CreateMetricsResult(metrics={"samples": SumMetric()})

    def update_metrics(self, ctx: UpdateMetricsContext[Batch]) -> None:
        ctx.metrics["samples"].update(torch.tensor(float(len(ctx.state.index))))


@dataclasses.dataclass
class Job:
    trainer: Trainer
    task: Task
    log: Path

    def losses(self) -> dict[int, float]:
        return self.logged("loss")

    def logged(self, name: str) -> dict[int, float]:
        points = [json.loads(line) for line in self.log.read_text().splitlines()]
        return {point["step"]: point["value"] for point in points if point.get("name") == name}

    @property
    def model(self) -> nn.Module:
        return self.trainer._state.tracked_modules.modules[0]


def build_job(
    mesh: DeviceMeshParameters,
    folder: Path,
    *,
    total_steps: int | None = 20,
    microbatch_size: int = 2,
    dtype: torch.dtype = torch.float64,
    dropout: float = 0.0,
    weight: WeightFn = unweighted,
    overrides: dict[str, Any] | None = None,
    data_provider: DataProvider | None = None,
    optimizer: dict[str, Any] | OptimizerProvider | None = None,
    task_class: Callable[[WeightFn], "Task"] | None = None,
    model_provider: ModelProvider[Any] | None = None,
) -> Job:
    config = TrainerConfig.model_validate(
        {
            "run": {"name": "job"},
            "schedule": {"total_steps": total_steps},
            "logging": {"period_steps": 1, "tracker": {"provider": "jsonl", "path": str(folder / "log.jsonl")}},
            "determinism": {"base_seed": BASE_SEED},
            "gc": {"period_steps": 10},
            "checkpointing": {"save_dir": str(folder / "checkpoints"), "period_steps": "disable"},
            "gradient_clipping": {"max_norm": 0.5},
            **(overrides or {}),
        }
    )
    data = AutoDataConfig(
        global_batch_size=GLOBAL_BATCH_SIZE, microbatch_size=microbatch_size, num_workers=0, pin_memory=False
    )
    schedule = {
        "initial_multiplier": 1.0,
        "phases": [{"mode": "rest", "target_multiplier": 0.1, "curve": {"type": "linear"}}],
    }
    task = (task_class or Task)(weight)
    optimizer_provider = (
        AutoOptimizerProvider(
            TypeAdapter(AutoOptimizerConfig).validate_python(optimizer or {"name": "adamw", "lr": 0.05})
        )
        if optimizer is None or isinstance(optimizer, dict)
        else optimizer
    )
    trainer = TrainingConfigurator(
        mesh=mesh,
        parameters=config,
        task_provider=lambda context: task,
        model_provider=model_provider or Provider(dtype, dropout),
        data_provider=data_provider or AutoDataProvider(lambda context: Data(NUM_SAMPLES, dtype), collate, data),
        optimizer_provider=optimizer_provider,
        lr_scheduler_provider=AutoLRSchedulerProvider(
            TypeAdapter(AutoLRSchedulerConfig).validate_python({"name": "piecewise", "scheduler": schedule})
        ),
    ).configure()
    return Job(trainer, task, folder / "log.jsonl")


def build_model(dtype: torch.dtype) -> Model:
    """The model of the job on one process, with its initial values."""
    with torch.device("meta"):
        model = Model(dtype, 0.0)
    materialize_module(model, torch.device("cpu"), BASE_SEED)
    return model


def plain_losses(
    total_steps: int,
    dtype: torch.dtype,
    weight: WeightFn = unweighted,
    model: nn.Module | None = None,
    skips: Collection[int] = (),
) -> tuple[list[float], nn.Module]:
    """Train the same job in plain PyTorch on one process, each step on its whole global batch at once.

    With weights, the loss of a step is the weighted mean over its microbatches of two samples. `skips` are steps, counted
    from 1, that do not update the model.
    """
    model = model or build_model(dtype)
    data = Data(NUM_SAMPLES, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.9 * step / total_steps)
    losses: list[float] = []
    for step in range(total_steps):
        index = torch.arange(step * GLOBAL_BATCH_SIZE, (step + 1) * GLOBAL_BATCH_SIZE)
        squares = (model(data.x[index], None) - data.y[index]).square().view(-1, 2).mean(1)
        weights = torch.ones(len(squares), dtype=dtype)
        for row, members in enumerate(index.view(-1, 2)):
            if (own := weight(members)) is not None:
                weights[row] = own
        loss = (squares * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if step + 1 not in skips:
            optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, model
