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
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
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


def timed(action: Callable[[], object]) -> float:
    """Return the microseconds that an action takes, of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    action()
    duration = torch.tensor((time.perf_counter() - start) * 1e6)
    dist.all_reduce(duration, op=dist.ReduceOp.MAX)
    return duration.item()


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

    saves: dict[str, list[float]] = {name: [] for name in ("dcp", "ours", "ours, wait", "ours, complete", "copy")}
    loads: dict[str, list[float]] = {name: [] for name in ("dcp", "ours", "ours, verified")}

    def verify_and_load() -> None:
        found = find_checkpoint(CheckpointFolder(root / "ours", LOGGER), world, "raise", LOGGER)
        assert found is not None
        load_state(found.path, state, dist.group.WORLD)

    for index in range(args.rounds + 1):
        measured = dict.fromkeys(saves, 0.0)
        fresh(root / "dcp")
        measured["dcp"] = timed(lambda: dcp.save(state, checkpoint_id=root / "dcp"))
        fresh(root / "ours")
        measured["ours"] = timed(lambda: ours.save(state, 1))
        fresh(root / "background")
        measured["ours, wait"] = timed(lambda: in_background.save(state, 1))
        measured["ours, complete"] = measured["ours, wait"] + timed(in_background.wait)
        copies = [tensor.to_local().clone() for tensor in state["model"].values()]
        measured["copy"] = timed(
            lambda copies=copies: [
                copy.copy_(tensor.to_local()) for copy, tensor in zip(copies, state["model"].values(), strict=True)
            ]
        )
        del copies
        read = {
            "dcp": timed(lambda: dcp.load(state, checkpoint_id=root / "dcp")),
            "ours": timed(lambda: load_state(root / "ours" / "save-1", state, dist.group.WORLD)),
            "ours, verified": timed(verify_and_load),
        }
        if index > 0:  # the first round makes buffers and warms caches
            for name, value in measured.items():
                saves[name].append(value)
            for name, value in read.items():
                loads[name].append(value)
    report(f"save {args.mib} MiB on {dist.get_world_size()} ranks", saves, "dcp")
    report(
        "  of a save that training waits for",
        {name: saves[name] for name in ("ours", "ours, wait", "ours, complete")},
        "ours",
    )
    report("load", loads, "dcp")
    in_background.close()
    fresh(root)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
