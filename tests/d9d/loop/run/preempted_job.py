"""A job that tests start as processes: `python -m tests.d9d.loop.run.preempted_job FOLDER PLAN`.

PLAN says when which signals come: "once:STEP" sends SIGTERM to the last rank, in a first run alone; "wait" lets each step
take a while, so that the launcher can be signalled; "twice" sends a second signal to a single process while it saves.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.event.catalogue.train import EVENT_TRAIN_FORWARD_BACKWARD_POST
from tests.d9d.loop.run.regression_job import Task, build_job

TOTAL_STEPS = 8


class SignalledInSave(Task):
    """Gets a second signal in the middle of the save that the first one has led to."""

    is_told = False

    def state_dict(self) -> dict[str, Any]:
        if self.is_told:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().state_dict()


def main(folder: Path, plan: str) -> None:
    """Train 8 steps with a checkpoint after every second one."""
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = DeviceMeshParameters(data_parallel_shard=num_ranks)
    saving = {"checkpointing": {"save_dir": str(folder / "saved"), "period_steps": 2}}
    job = build_job(mesh, folder, total_steps=TOTAL_STEPS, overrides=saving, task_class=SignalledInSave)
    is_first_run = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and not (folder / "ran").exists()

    def handle(context) -> None:
        step = context.schedule.current_step + 1
        is_last_rank = num_ranks == 1 or dist.get_rank() == num_ranks - 1
        match plan.split(":"):
            case ["once", at] if is_first_run and is_last_rank and step == int(at):
                os.kill(os.getpid(), signal.SIGTERM)
            case ["wait"] if is_first_run:
                (folder / "ran").touch()
                time.sleep(0.5)
            case ["twice"] if is_first_run and step == 3:
                SignalledInSave.is_told = True
                os.kill(os.getpid(), signal.SIGTERM)
            case _:
                pass

    job.trainer._state.event_bus.subscribe(EVENT_TRAIN_FORWARD_BACKWARD_POST, handle)
    job.trainer.train()
    (folder / "complete").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
