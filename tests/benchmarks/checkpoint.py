"""Training checkpoints against PyTorch's own distributed checkpoints, in one run.

Run: torchrun --nproc-per-node 1 -m tests.benchmarks.checkpoint [--mib 512] [--rounds 5] [--dir /tmp]

A state of sharded tensors, as of a model and its optimizer, is

- saved: ours (hashed, with a commit record, everything on the disk) against `torch.distributed.checkpoint.save`,
- saved in the background: how long training waits, and how long until the checkpoint is complete,
- loaded: ours (all files verified first, and without that) against `torch.distributed.checkpoint.load`.

Variants take turns; each save goes to a new folder, which is removed outside of the measured time.
"""

import argparse
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from d9d.checkpoint import CheckpointFolder, CheckpointSaver, find_checkpoint, load_state
from d9d.core.participants import Participants
from tests.benchmarks.rounds import report

TENSOR_BYTES = 16 << 20
LOGGER = logging.getLogger("benchmark")


class Clock:
    """Wall and CPU time of actions, by name, one value for each round."""

    def __init__(self) -> None:
        self.wall_us: dict[str, list[float]] = {}
        self.cpu_us: dict[str, list[float]] = {}

    def time(self, name: str, action: Callable[[], object]) -> None:
        """Take the time of an action: on the clock that of the slowest rank, of cores that of all ranks."""
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        action()
        wall = torch.tensor((time.perf_counter() - start) * 1e6)
        cpu = torch.tensor((time.process_time() - cpu_start) * 1e6)
        dist.all_reduce(wall, op=dist.ReduceOp.MAX)
        dist.all_reduce(cpu)
        self.wall_us.setdefault(name, []).append(wall.item())
        self.cpu_us.setdefault(name, []).append(cpu.item())

    def report(self, title: str, names: Sequence[str], baseline: str) -> None:
        """Print ratios to a baseline. The first round, which makes buffers and warms caches, does not count."""
        for kind, times in (("", self.wall_us), ("CPU of all ranks, ", self.cpu_us)):
            report(f"{kind}{title}", {name: times[name][1:] for name in names}, baseline)


def fresh(folder: Path) -> Path:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    return folder


def build_state(mib: int) -> dict[str, dict[str, torch.Tensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    num_tensors = max((mib << 20) // TENSOR_BYTES, 1)
    full = torch.arange(TENSOR_BYTES // 4, dtype=torch.float32).view(1024, -1)
    return {
        "model": {f"weight_{index}": distribute_tensor(full + index, mesh, [Shard(0)]) for index in range(num_tensors)}
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    warnings.filterwarnings("ignore")
    root = args.dir / "checkpoint-benchmark"
    state = build_state(args.mib)
    world = Participants([dist.group.WORLD])
    background = Participants([dist.new_group()])
    ours = CheckpointSaver(CheckpointFolder(root / "ours", LOGGER), world)
    in_background = CheckpointSaver(CheckpointFolder(root / "background", LOGGER), world, background)

    clock = Clock()

    def save_both(index: int) -> None:
        fresh(root / "dcp")
        fresh(root / "ours")
        pair: list[tuple[str, Callable[[], object]]] = [
            ("save: dcp", lambda: dcp.save(state, checkpoint_id=root / "dcp")),
            ("save: ours", lambda: ours.save(state, 1)),
        ]
        for name, action in pair[:: 1 if index % 2 else -1]:
            os.sync()  # the disk may still be busy with the round before
            clock.time(name, action)

    def save_in_background() -> None:
        fresh(root / "background")
        os.sync()
        clock.time("save: ours, wait", lambda: in_background.save(state, 1))
        clock.time("save: ours, then", in_background.wait)

    def verify_and_load() -> None:
        found = find_checkpoint(CheckpointFolder(root / "ours", LOGGER), world, "raise", LOGGER)
        assert found is not None
        load_state(found.path, state, dist.group.WORLD)

    def load_all(index: int) -> None:
        loads: list[tuple[str, Callable[[], object]]] = [
            ("load: dcp", lambda: dcp.load(state, checkpoint_id=root / "dcp")),
            ("load: ours, not verified", lambda: load_state(root / "ours" / "save-1", state, dist.group.WORLD)),
            ("load: ours", verify_and_load),
        ]
        for name, action in loads[:: 1 if index % 2 else -1]:
            clock.time(name, action)

    for index in range(args.rounds + 1):
        save_both(index)
        save_in_background()
        load_all(index)
    size = f"{args.mib} MiB on {dist.get_world_size()} ranks"
    clock.report(f"save {size}", ["save: dcp", "save: ours"], "save: dcp")
    clock.report("save in the background", ["save: ours", "save: ours, wait", "save: ours, then"], "save: ours")
    clock.report(f"load {size}", ["load: dcp", "load: ours, not verified", "load: ours"], "load: dcp")
    in_background.close()
    fresh(root)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
