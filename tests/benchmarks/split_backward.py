"""A backward pass in two halves against a whole one, and against torch's own halves.

Run: python -m tests.benchmarks.split_backward [--model transformer|mlp] [--width 256] [--rounds 15]
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import _backward as torch_backward

from d9d.pipelining.backward import stage_backward_full, stage_backward_input, stage_backward_weight


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class Stage:
    """A model whose backward pass is measured, with gradients that are there already, as between microbatches."""

    def __init__(self, module: nn.Module, batch: torch.Tensor) -> None:
        self.module, self.batch = module, batch

    def forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.batch.clone().requires_grad_()
        y = self.module(x)
        return x, y, torch.ones_like(y)

    def whole(self) -> tuple[float, float]:
        x, y, grad = self.forward()
        start = time.perf_counter()
        stage_backward_full([y], [grad], [x])
        return time.perf_counter() - start, 0.0

    def halves(self) -> tuple[float, float]:
        x, y, grad = self.forward()
        start = time.perf_counter()
        result = stage_backward_input([y], [grad], [x], self.module.parameters())
        middle = time.perf_counter()
        stage_backward_weight(self.module.parameters(), result.param_groups)
        return middle - start, time.perf_counter() - middle

    def halves_of_torch(self) -> tuple[float, float]:
        x, y, grad = self.forward()
        start = time.perf_counter()
        _, groups = torch_backward.stage_backward_input([y], [grad], [x], self.module.parameters())
        middle = time.perf_counter()
        torch_backward.stage_backward_weight(self.module.parameters(), groups)
        return middle - start, time.perf_counter() - middle


def measure(run: Callable[[], tuple[float, float]], num_calls: int) -> tuple[float, float]:
    """Return the 20th percentile of each half, which leaves out what other processes have interrupted."""
    gc.collect()
    gc.disable()
    halves = zip(*(run() for _ in range(num_calls)), strict=True)
    first, second = (sorted(half)[num_calls // 5] for half in halves)
    gc.enable()
    return first, second


def describe(ratios: list[float]) -> str:
    ratios = sorted(ratios)
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    return f"{statistics.median(ratios):6.3f} [{low:.3f} .. {high:.3f}]"


def build_stage(model: str, width: int, depth: int, tokens: int) -> Stage:
    if model == "mlp":
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
        return Stage(nn.Sequential(*layers), torch.randn(8, width))
    return Stage(nn.Sequential(*[Block(width, 4) for _ in range(depth)]), torch.randn(2, tokens // 2, width))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("transformer", "mlp"), default="transformer")
    parser.add_argument("--width", type=int, help="default: 256, or 32 of the MLP")
    parser.add_argument("--depth", type=int, help="default: 2 blocks, or 96 layers")
    parser.add_argument("--tokens", type=int, default=512, help="of a microbatch of the transformer")
    parser.add_argument("--calls", type=int, help="in each round; default: 5, or 20 of the MLP")
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    is_mlp = arguments.model == "mlp"
    width = arguments.width or (32 if is_mlp else 256)
    depth = arguments.depth or (96 if is_mlp else 2)
    num_calls = arguments.calls or (20 if is_mlp else 5)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    stage = build_stage(arguments.model, width, depth, arguments.tokens)
    variants = {"whole": stage.whole, "d9d": stage.halves, "torch": stage.halves_of_torch}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for run in variants.values():
        measure(run, 5)
    for index in range(arguments.rounds):
        for name in list(variants)[:: 1 if index % 2 == 0 else -1]:
            times[name].append(measure(variants[name], num_calls))
    whole = [sum(halves) for halves in times["whole"]]
    print(
        f"torch {torch.__version__}, {arguments.model} of width {width}, depth {depth}: "
        f"whole backward {statistics.median(whole) * 1e3:.2f} ms; relative to it, median [p10 .. p90]"
    )
    for name in ("d9d", "torch"):
        columns = {
            "I": [first / base for (first, _), base in zip(times[name], whole, strict=True)],
            "W": [second / base for (_, second), base in zip(times[name], whole, strict=True)],
            "I+W": [sum(halves) / base for halves, base in zip(times[name], whole, strict=True)],
        }
        print(f"  {name:6s}" + "   ".join(f"{label} {describe(ratios)}" for label, ratios in columns.items()))


if __name__ == "__main__":
    main()
