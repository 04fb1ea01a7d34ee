"""A step of the native Trainer against the same arithmetic in a bare loop, on one process.

Run: python -m tests.benchmarks.trainer_overhead [--width 512] [--microbatches 1]
"""

import argparse
import dataclasses
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import nn

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.auto import (
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
    InitializeModelStageContext,
    InitializeModelStageResult,
    ModelProvider,
    ParallelizeModelStageContext,
    RegisterTaskEventsContext,
    TrainTask,
)
from d9d.loop.event.catalogue.train import EVENT_TRAIN_STEP_POST
from d9d.loop.run import TrainingConfigurator
from d9d.model_state.mapper.adapters import identity_mapper_from_module


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, inputs: Batch, shared: None) -> torch.Tensor:
        return self.layers(inputs.x)

    def reset_parameters(self) -> None:
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()


class Provider(ModelProvider[MLP]):
    def __init__(self, width: int) -> None:
        self._width = width

    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[MLP]:
        model = MLP(self._width)
        return InitializeModelStageResult(model=model, state_mapper=identity_mapper_from_module(model))

    def parallelize_model_stage(self, context: ParallelizeModelStageContext[MLP]) -> None:
        pass


class Task(TrainTask[Batch, Batch, None, torch.Tensor, Batch]):
    def __init__(self, durations: list[float]) -> None:
        self.durations = durations
        self.last = 0.0

    def build_forward_inputs(self, ctx: BuildForwardInputsContext[Batch]) -> BuildForwardInputsResult:
        return BuildForwardInputsResult(input=ctx.batch, shared=None, state=ctx.batch)

    def compute_loss(self, ctx: ComputeLossContext[torch.Tensor, Batch]) -> ComputeLossResult:
        return ComputeLossResult(loss=F.mse_loss(ctx.pipeline_results, ctx.state.y), loss_weight=None)

    def register_events(self, context: RegisterTaskEventsContext) -> None:
        context.event_bus.subscribe(EVENT_TRAIN_STEP_POST, self._note)

    def _note(self, context: object) -> None:
        now = time.perf_counter()
        self.durations.append(now - self.last)
        self.last = now


class Stream:
    """The same pack again and again, so that only the loop is measured."""

    def __init__(self, pack: list[Batch], total_steps: int) -> None:
        self._pack = pack
        self.total_steps = total_steps

    def __iter__(self) -> Iterator[list[Batch]]:
        for _ in range(self.total_steps):
            yield self._pack

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def run_trainer(width: int, pack: list[Batch], steps: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        config = TrainerConfig.model_validate(
            {
                "run": {"name": "benchmark"},
                "logging": {"period_steps": 50, "tracker": {"provider": "null"}},
                "determinism": {"base_seed": 1},
                "gc": {"period_steps": 100000},
                "data_prefetch": {"prefetch_factor": 0},
                "checkpointing": {"save_dir": folder, "period_steps": "disable"},
                "gradient_clipping": {"max_norm": 1.0},
            }
        )
        optimizer = TypeAdapter(AutoOptimizerConfig).validate_python({"name": "adamw", "lr": 1e-3})
        schedule = {
            "initial_multiplier": 1.0,
            "phases": [{"mode": "rest", "target_multiplier": 0.1, "curve": {"type": "cosine"}}],
        }
        lr_scheduler = TypeAdapter(AutoLRSchedulerConfig).validate_python({"name": "piecewise", "scheduler": schedule})
        durations: list[float] = []
        trainer = TrainingConfigurator(
            mesh=DeviceMeshParameters(),
            parameters=config,
            task_provider=lambda context: Task(durations),
            model_provider=Provider(width),
            data_provider=lambda context: Stream(pack, steps),
            optimizer_provider=AutoOptimizerProvider(optimizer),
            lr_scheduler_provider=AutoLRSchedulerProvider(lr_scheduler),
        ).configure()
        trainer.train()
    return durations[steps // 10 :]


def run_bare(width: int, pack: list[Batch], steps: int) -> list[float]:
    model = MLP(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    durations: list[float] = []
    last = time.perf_counter()
    for _ in range(steps):
        for batch in pack:
            (F.mse_loss(model(batch, None), batch.y) / len(pack)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        now = time.perf_counter()
        durations.append(now - last)
        last = now
    return durations[steps // 10 :]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    pack = [Batch(torch.randn(8, arguments.width), torch.randn(8, 1)) for _ in range(arguments.microbatches)]
    ratios: list[float] = []
    extra_us: list[float] = []
    for _ in range(arguments.rounds):
        ours, bare = (
            sorted(run(arguments.width, pack, arguments.steps))[arguments.steps // 5] for run in (run_trainer, run_bare)
        )
        ratios.append(ours / bare)
        extra_us.append((ours - bare) * 1e6)
    print(
        f"width {arguments.width}, {arguments.microbatches} microbatches: native Trainer x bare loop "
        f"{statistics.median(ratios):.3f} [{min(ratios):.3f} .. {max(ratios):.3f}], "
        f"{statistics.median(extra_us):+.0f} us per step"
    )


if __name__ == "__main__":
    main()
