"""Time several variants of one thing against each other in one process group, so that ratios hold on a busy machine."""

import gc
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def time_rounds(
    variants: dict[str, Callable[[], object]], *, num_calls: int, num_rounds: int
) -> dict[str, list[float]]:
    """Return, per variant and round, the 20th percentile of the times of single calls in microseconds, slowest rank.

    Variants take turns, in alternating order. The percentile leaves out calls that other processes have interrupted.
    """
    for run in variants.values():
        for _ in range(3):
            run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(num_rounds):
        for name in list(variants)[:: 1 if index % 2 == 0 else -1]:
            times[name].append(_time_calls(variants[name], num_calls))
    return times


def _time_calls(run: Callable[[], object], num_calls: int) -> float:
    gc.collect()
    gc.disable()
    if dist.is_initialized():
        dist.barrier()
    durations: list[float] = []
    for _ in range(num_calls):
        start = time.perf_counter()
        run()
        durations.append(time.perf_counter() - start)
    gc.enable()
    slowest = torch.tensor(sorted(durations)[num_calls // 5] * 1e6)
    if dist.is_initialized():
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def report(title: str, times: dict[str, list[float]], baseline: str) -> None:
    """Print median times, and median, 10th and 90th percentile of the ratios to a baseline, on rank 0."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    print(title)
    for name, measured in times.items():
        ratios = sorted(a / b for a, b in zip(measured, times[baseline], strict=True))
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        print(
            f"  {name:28s} {statistics.median(measured):10.0f} us   "
            f"x {baseline} {statistics.median(ratios):6.3f}  [{low:.3f} .. {high:.3f}]"
        )
