"""Steps of a Lightning Trainer with D9DStrategy against Lightning's own strategies, in one run.

Run: torchrun --nproc-per-node 2 -m tests.benchmarks.lightning_strategy [--against ddp] [--width 64] [--accumulate 1]

``--against ddp``: DDPStrategy against replicas; on one process it shows what the strategy itself costs.
``--against fsdp``: ModelParallelStrategy against shards, with the same FSDP units.
``--against microbatches`` (one process): a batch in four microbatches against a plain loop over them.
"""

import argparse
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from d9d_lightning import D9DStrategy

BATCH = 16
MICROBATCHES = 4


class Module(L.LightningModule):
    """An MLP whose step does nothing but train."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_layers)]
        self.model = nn.Sequential(*layers, nn.Linear(width, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.model(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class ShardedModule(Module):
    """The same for ModelParallelStrategy, which leaves the distribution to the module."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model[:-1]:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=False)


class Stopwatch(L.Callback):
    """Notes how long each batch takes, from the end of one to the end of the next."""

    def __init__(self) -> None:
        self.durations: list[float] = []
        self._last = 0.0

    def on_train_batch_end(self, *args: object) -> None:
        now = time.perf_counter()
        self.durations.append(now - self._last)
        self._last = now


def time_fit(strategy: Strategy, module: Module, batch_size: int, arguments: argparse.Namespace) -> float:
    """Return the 20th percentile of the times of a batch in microseconds."""
    torch.manual_seed(0)
    stopwatch = Stopwatch()
    # Ready-made batches: putting samples together takes longer than a step.
    batches = list(torch.randn(arguments.steps, batch_size, arguments.width))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_epochs=1,
        accumulate_grad_batches=arguments.accumulate,
        callbacks=[stopwatch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))
    measured = sorted(stopwatch.durations[arguments.steps // 10 :])
    if arguments.accumulate > 1:
        # Batches with and without a sum: the whole window counts.
        return statistics.mean(measured) * 1e6
    return measured[len(measured) // 5] * 1e6


def time_plain_microbatch(arguments: argparse.Namespace) -> float:
    """Return the time of a forward and a backward pass of one microbatch in plain torch, as above."""
    model, x = Module(arguments.width, arguments.layers).model, torch.randn(BATCH, arguments.width)
    durations: list[float] = []
    for _ in range(arguments.steps):
        start = time.perf_counter()
        (model(x).square().mean() / MICROBATCHES).backward()
        durations.append(time.perf_counter() - start)
    return sorted(durations)[len(durations) // 5] * 1e6


def compare(
    names: tuple[str, str], runs: tuple[Callable[[], float], Callable[[], float]], arguments: argparse.Namespace
) -> None:
    """Let two variants take turns, and print the ratio of their times on rank 0."""
    ratios: list[float] = []
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(arguments.rounds):
        measured = {}
        for position in (0, 1) if index % 2 == 0 else (1, 0):
            measured[position] = runs[position]()
            times[position].append(measured[position])
        ratios.append(measured[0] / measured[1])
    if os.environ["RANK"] == "0":
        print(
            f"Lightning, {os.environ['WORLD_SIZE']} processes, width {arguments.width}, accumulate {arguments.accumulate}: "
            f"{names[0]} {statistics.median(times[0]):.0f} us, x {names[1]} {statistics.median(ratios):.3f} "
            f"[{min(ratios):.3f} .. {max(ratios):.3f}]"
        )


def time_microbatches(arguments: argparse.Namespace) -> None:
    """Print what each further microbatch costs over its forward and backward pass."""
    extra: list[float] = []
    plain: list[float] = []
    for _ in range(arguments.rounds):
        module = (arguments.width, arguments.layers)
        one = time_fit(D9DStrategy(), Module(*module), BATCH, arguments)
        split = D9DStrategy(microbatches=MICROBATCHES)
        several = time_fit(split, Module(*module), BATCH * MICROBATCHES, arguments)
        plain.append(time_plain_microbatch(arguments))
        extra.append((several - one) / (MICROBATCHES - 1) - plain[-1])
    print(
        f"Lightning, width {arguments.width}: each further microbatch costs {statistics.median(extra):.0f} us "
        f"[{min(extra):.0f} .. {max(extra):.0f}] more than its forward and backward pass ({statistics.median(plain):.0f} us)"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", choices=["ddp", "fsdp", "microbatches"], default="ddp")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    size = (arguments.width, arguments.layers)
    world = int(os.environ["WORLD_SIZE"])
    match arguments.against:
        case "microbatches":
            time_microbatches(arguments)
        case "ddp":
            ours = lambda: time_fit(D9DStrategy(), Module(*size), BATCH, arguments)  # noqa: E731
            theirs = lambda: time_fit(DDPStrategy(), Module(*size), BATCH, arguments)  # noqa: E731
            compare(("D9DStrategy", "DDPStrategy"), (ours, theirs), arguments)
        case _:
            mesh = {"data_parallel_shard": world}
            ours = lambda: time_fit(D9DStrategy(mesh), Module(*size), BATCH, arguments)  # noqa: E731
            theirs = lambda: time_fit(  # noqa: E731
                ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
                ShardedModule(*size),
                BATCH,
                arguments,
            )
            compare(("D9DStrategy, shards", "ModelParallelStrategy"), (ours, theirs), arguments)


if __name__ == "__main__":
    main()
