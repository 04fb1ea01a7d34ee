"""The job that faults are injected into, and the trail by which it is judged.

The job is the regression job of the training loop on sharded ranks, with dropout and accumulation, and a checkpoint after
each step. Each rank appends a line to its trail when a step begins: the step, and a digest of all that it has in memory
(weights, optimizer, learning rates, random generators), and one when it ends, with the samples that it has read. A job that was
resumed must write the lines of one that nothing has happened to. Points of a save are in the trail too.
"""

import dataclasses
import hashlib
import json
import os
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.placement import local_tensor
from d9d.loop.component import StateCheckpointer
from d9d.loop.event.catalogue.common import EventStepContext
from d9d.loop.event.catalogue.train import EVENT_TRAIN_READY, EVENT_TRAIN_STEP_POST, EVENT_TRAIN_STEP_PRE
from d9d.pipelining.training import PipelinedOptimizer
from tests.d9d.loop.run.regression_job import Job, build_job

TOTAL_STEPS = 12
NUM_RANKS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A line of a trail: what a rank had when a step began."""

    number: int
    digest: str


def train(
    folder: str,
    options: dict[str, Any] | None = None,
    stop_at: tuple[str, int] | None = None,
    stopped_ranks: tuple[int, ...] = tuple(range(NUM_RANKS)),
) -> None:
    """Train to the end, resuming from what is in the folder. Runs on each rank.

    Args:
        folder: Of the run.
        options: Of the section `checkpointing`, beside where and that each step is saved.
        stop_at: Point of a save and how often it is passed before a rank waits there for ever; its trail tells that it does.
            "collective" is the point before each collective of saves.
        stopped_ranks: Ranks that wait there.
    """
    job = sharded_job(Path(folder), options)
    trail = Trail(Path(folder), dist.get_rank())
    trail.write("start")
    probe = Probe(trail, stop_at if dist.get_rank() in stopped_ranks else None)
    checkpointer = job.trainer._state.checkpointer
    checkpointer._saver._probe = probe
    checkpointer._checkpoints.folder._probe = probe
    bus = job.trainer._state.event_bus
    # What is agreed before the first step has nothing to do with saves.
    bus.subscribe(EVENT_TRAIN_READY, lambda _: probe.watch_collectives(checkpointer))
    bus.subscribe(EVENT_TRAIN_STEP_PRE, lambda context: trail.write_step(job, context))
    bus.subscribe(EVENT_TRAIN_STEP_POST, lambda context: trail.write_read(job, context))
    try:
        job.trainer.train()
    except BaseException:
        traceback.print_exc()  # the harness takes its hands off the output before Python prints
        raise


def sharded_job(folder: Path, options: dict[str, Any] | None = None) -> Job:
    checkpointing = {"save_dir": str(folder / "checkpoints"), "period_steps": 1, "num_to_keep": 2, **(options or {})}
    return build_job(
        DeviceMeshParameters(data_parallel_shard=NUM_RANKS),
        folder,
        total_steps=TOTAL_STEPS,
        dropout=0.3,
        overrides={"checkpointing": checkpointing},
    )


def logged(folder: Path) -> dict[tuple[int, str], object]:
    """Return what was logged, by step and name; of a step that was done again the last value."""
    points = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {(point["step"], point["name"]): point["value"] for point in points if "step" in point}


class Trail:
    """What a rank did, in a file that nothing in this process can lose."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"trail-{rank}.txt"

    def write(self, line: str) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, f"{line}\n".encode())
        os.close(descriptor)

    def write_step(self, job: Job, context: EventStepContext) -> None:
        self.write(f"step {context.schedule.current_step} {digest(job)}")

    def write_read(self, job: Job, context: EventStepContext) -> None:
        self.write(f"read {context.schedule.current_step} {job.task.read}")
        job.task.read.clear()

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def read(self) -> dict[str, set[str]]:
        """Return which samples each step has read, by its number; one list for each step where all attempts agree."""
        found: dict[str, set[str]] = {}
        for line in self.lines():
            kind, _, rest = line.partition(" ")
            if kind == "read":
                step, _, samples = rest.partition(" ")
                found.setdefault(step, set()).add(samples)
        return found

    def steps(self) -> list[Step]:
        words = [line.split() for line in self.lines() if line.startswith("step ")]
        return [Step(number=int(number), digest=of_state) for _, number, of_state in words]


class Probe:
    """Writes the points of a save to the trail, and waits at one of them until the process is killed."""

    def __init__(self, trail: Trail, stop_at: tuple[str, int] | None) -> None:
        self._trail = trail
        self._point, self._num_before = stop_at or ("", 0)

    def watch_collectives(self, checkpointer: StateCheckpointer) -> None:
        """Take each collective of the saves to come as a point; those of one kind of save come in the same order each time."""
        saver = checkpointer._saver
        for participants in (saver._participants, saver._in_background):
            if participants is not None:
                participants.gather = self._before(participants.gather)
                participants.gather_to_first = self._before(participants.gather_to_first)
                participants.scatter_from_first = self._before(participants.scatter_from_first)

    def _before(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def probed(*args: Any) -> Any:
            self._stop_if_due("collective")
            return collective(*args)

        return probed

    def __call__(self, point: str) -> None:
        self._trail.write(point)
        self._stop_if_due(point)

    def _stop_if_due(self, point: str) -> None:
        if point == self._point:
            if self._num_before == 0:
                self._trail.write("stopped")
                threading.Event().wait()
            self._num_before -= 1


def digest(job: Job) -> str:
    """Hash what a step depends on, bit for bit."""
    state = job.trainer._state
    assert isinstance(state.optimizer, PipelinedOptimizer)
    tensors: list[torch.Tensor] = [local_tensor(parameter.detach()) for parameter in job.model.parameters()]
    rates: list[float] = []
    for optimizer in state.optimizer.by_stage.values():
        assert isinstance(optimizer, Optimizer)
        for group in optimizer.param_groups:
            rates.append(group["lr"])
            of_group = [optimizer.state[parameter] for parameter in group["params"]]
            tensors += [local_tensor(of_one[name]) for of_one in of_group for name in sorted(of_one)]
    hashed = hashlib.sha256(repr(rates).encode())
    for tensor in [*tensors, torch.get_rng_state()]:
        hashed.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
