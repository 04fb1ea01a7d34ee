"""A step of a Lightning Trainer with D9DStrategy against Lightning's own DDPStrategy, in one run.

Run: torchrun --nproc-per-node 2 -m tests.benchmarks.lightning_strategy [--width 64] [--accumulate 1]
"""

import argparse
import logging
import os
import statistics
import time
import warnings

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from d9d_lightning import D9DStrategy


class Module(L.LightningModule):
    """An MLP whose step does nothing but train."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_layers)]
        self.model = nn.Sequential(*layers, nn.Linear(width, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Stopwatch(L.Callback):
    """Notes how long each batch takes, from the end of one to the end of the next."""

    def __init__(self) -> None:
        self.durations: list[float] = []
        self._last = 0.0

    def on_train_batch_end(self, *args: object) -> None:
        now = time.perf_counter()
        self.durations.append(now - self._last)
        self._last = now


def time_fit(strategy: L.pytorch.strategies.Strategy, arguments: argparse.Namespace) -> float:
    """Return the 20th percentile of the times of a batch in microseconds."""
    torch.manual_seed(0)
    stopwatch = Stopwatch()
    data = DataLoader(TensorDataset(torch.randn(16 * arguments.steps, arguments.width)), batch_size=16)
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
    trainer.fit(Module(arguments.width, arguments.layers), data)
    measured = sorted(stopwatch.durations[arguments.steps // 10 :])
    if arguments.accumulate > 1:
        # Batches with and without a sum: the whole window counts.
        return statistics.mean(measured) * 1e6
    return measured[len(measured) // 5] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=1)
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    ratios: list[float] = []
    for _ in range(arguments.rounds):
        ours, ddp = (time_fit(strategy(), arguments) for strategy in (D9DStrategy, DDPStrategy))
        ratios.append(ours / ddp)
    if os.environ["RANK"] == "0":
        print(
            f"Lightning, {os.environ['WORLD_SIZE']} processes, width {arguments.width}, accumulate "
            f"{arguments.accumulate}: D9DStrategy {ours:.0f} us, x DDPStrategy {statistics.median(ratios):.3f} "
            f"[{min(ratios):.3f} .. {max(ratios):.3f}]"
        )


if __name__ == "__main__":
    main()
