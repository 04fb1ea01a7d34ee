"""Steps of a Lightning Trainer with D9DStrategy against Lightning's own strategies, in one run.

Run: torchrun --nproc-per-node 2 -m tests.benchmarks.lightning_strategy [--against ddp] [--width 64] [--accumulate 1]

``--against ddp``: DDPStrategy against replicas; on one process it shows what the strategy itself costs.
``--against fsdp``: ModelParallelStrategy against shards, with the same FSDP units.
``--against microbatches`` (one process): a batch in four microbatches against a plain loop over them. In seconds of the
processor, which one thread does all on its own: the clock would count other programs on a busy machine.
"""

import argparse
import itertools
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

    def __init__(self, clock: Callable[[], float]) -> None:
        self.durations: list[float] = []
        self._clock = clock
        self._last = 0.0

    def on_train_batch_end(self, *args: object) -> None:
        now = self._clock()
        self.durations.append(now - self._last)
        self._last = now


def time_fit(
    strategy: Strategy,
    module: Module,
    batch_size: int,
    arguments: argparse.Namespace,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the 20th percentile of the times of a batch in microseconds."""
    torch.manual_seed(0)
    stopwatch = Stopwatch(clock)
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


def time_plain_loop(num_microbatches: int, arguments: argparse.Namespace) -> float:
    """Return the time of a batch as above, in a loop over its microbatches in plain torch."""
    module = Module(arguments.width, arguments.layers)
    optimizer = module.configure_optimizers()
    durations: list[float] = []
    for batch in torch.randn(arguments.steps, BATCH * num_microbatches, arguments.width):
        start = time.thread_time()
        optimizer.zero_grad()
        for index, microbatch in enumerate(batch.split(BATCH)):
            (module.training_step(microbatch, index) / num_microbatches).backward()
        optimizer.step()
        durations.append(time.thread_time() - start)
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
    """Print what each further microbatch costs more than in a plain loop."""
    size = (arguments.width, arguments.layers)
    counts = (1, MICROBATCHES, 4 * MICROBATCHES)
    extra: list[list[float]] = []
    for _ in range(arguments.rounds):
        ours = [
            time_fit(_strategy(count), Module(*size), BATCH * count, arguments, time.thread_time) for count in counts
        ]
        plain = [time_plain_loop(count, arguments) for count in counts]
        more = [one - other for one, other in zip(ours, plain, strict=True)]
        extra.append([(more[i + 1] - more[i]) / (counts[i + 1] - counts[i]) for i in (0, 1)])
    for position, span in enumerate(itertools.pairwise(counts)):
        column = [row[position] for row in extra]
        print(
            f"Lightning, width {arguments.width}: each microbatch from {span[0]} to {span[1]} costs "
            f"{statistics.median(column):.0f} us [{min(column):.0f} .. {max(column):.0f}] more than in a plain loop"
        )


def _strategy(num_microbatches: int) -> D9DStrategy:
    return D9DStrategy() if num_microbatches == 1 else D9DStrategy(microbatches=num_microbatches)


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
