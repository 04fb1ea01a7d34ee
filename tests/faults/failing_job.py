"""A job of which one rank fails in a given way at a given place. Run by torchrun, with its options as JSON."""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.protocol import MicrobatchPackStream
from d9d.core.types import MicrobatchPack
from d9d.loop.auto import AutoDataConfig, AutoDataProvider
from d9d.loop.control import (
    ComputeLossContext,
    ComputeLossResult,
    InitializeDataProviderContext,
    RegisterTaskEventsContext,
)
from d9d.loop.event.catalogue.train import EVENT_TRAIN_CONFIG_STARTED, EVENT_TRAIN_STEP_POST
from tests.d9d.loop.run.regression_job import GLOBAL_BATCH_SIZE, Batch, Data, Task, build_job, collate

CULPRIT = 1
STEP = 3
TORCHRUN_LIMIT_S = 500.0
NO_LIMITS: dict[str, float] = {"init_timeout": 600, "step_timeout": 600}
MESH = {"data_parallel_replicate": 2}
MESSAGE = "the sample is broken"


def fail(kind: str) -> None:
    """Fail on the culprit, and nowhere else."""
    if dist.get_rank() != CULPRIT:
        return
    FailingTask.folder.joinpath("failing").touch()
    match kind:
        case "raise":
            raise ValueError(MESSAGE)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            sys.exit(0)
        case "leave":
            os._exit(0)
        case "sleep":
            time.sleep(3600)
        case "none":
            pass
        case _:
            raise AssertionError(kind)


class FailingTask(Task):
    """Fails where it is told to."""

    kind = ""
    place = ""
    folder = Path()

    def register_events(self, context: RegisterTaskEventsContext) -> None:
        if self.place == "configure":
            context.event_bus.subscribe(EVENT_TRAIN_CONFIG_STARTED, lambda _: fail(self.kind))
        if self.place == "validation":
            context.event_bus.subscribe(EVENT_TRAIN_STEP_POST, lambda _: self.validate())

    def validate(self) -> None:
        if self._step == STEP:
            fail(self.kind)
        dist.all_reduce(torch.ones(1))

    _step = 0

    def compute_loss(self, ctx: ComputeLossContext[torch.Tensor, Batch]) -> ComputeLossResult:
        self._step = ctx.schedule.step_in_progress
        if self.place == "step" and self._step == STEP:
            fail(self.kind)
        return super().compute_loss(ctx)

    def state_dict(self) -> dict[str, Any]:
        if self.place == "save" and self._step == STEP:
            fail(self.kind)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.place == "load":
            fail(self.kind)
        super().load_state_dict(state_dict)


class FailingStream(MicrobatchPackStream):
    """Fails in the thread that reads ahead."""

    def __init__(self, inner: MicrobatchPackStream, kind: str) -> None:
        self._inner, self._kind = inner, kind

    def __iter__(self) -> Iterator[MicrobatchPack[Any]]:
        for number, pack in enumerate(self._inner, start=1):
            if number == STEP:
                fail(self._kind)
            yield pack

    @property
    def total_steps(self) -> int | None:
        return self._inner.total_steps

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)


def run(*options: Any) -> None:
    """Run the job, and fail. Prints errors itself, since the harness takes its hands off the output before Python does."""
    try:
        run_job(*options)
    except BaseException:
        traceback.print_exc()
        raise


def run_job(folder: str, kind: str, place: str, limits: dict[str, float], mesh: dict[str, int]) -> None:
    FailingTask.kind, FailingTask.place, FailingTask.folder = kind, place, Path(folder)
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/error-{os.environ['RANK']}.json"
    checkpointing = {"save_dir": f"{folder}/checkpoints", "period_steps": 1}
    if "save" in limits:
        checkpointing["timeout"] = limits["save"]
    data = AutoDataConfig(global_batch_size=GLOBAL_BATCH_SIZE, microbatch_size=2, num_workers=1, pin_memory=False)

    def provide(context: InitializeDataProviderContext) -> MicrobatchPackStream:
        stream = AutoDataProvider(lambda context: Data(GLOBAL_BATCH_SIZE * 30, torch.float64), collate, data)(context)
        return FailingStream(stream, kind) if place == "data" else stream

    job = build_job(
        DeviceMeshParameters.model_validate(mesh),
        Path(folder),
        total_steps=6 if place != "load" else 7,
        task_class=FailingTask,
        data_provider=provide,
        overrides={
            "checkpointing": checkpointing,
            "timeout": {name: int(limits[name]) for name in limits if name != "save"},
        },
    )
    job.trainer.train()


def torchrun(folder: Path, kind: str, limits: dict[str, float], *options: str) -> tuple[int, str]:
    """Run a job whose culprit fails in the third step, and return the exit code and all that was written."""
    arguments = json.dumps([str(folder), kind, "step", limits, MESH])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *options]
    done = subprocess.run(
        [*command, "-m", "tests.faults.failing_job", arguments],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TORCHRUN_LIMIT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout


if __name__ == "__main__":
    run(*json.loads(sys.argv[1]))
