"""Pipeline schedules against torch.distributed.pipelining and a minimal loop: forward and backward passes of a pack.

Run: torchrun --nproc-per-node 2 -m tests.benchmarks.pipeline --stage tiny|transformer|sleep
     python -m tests.benchmarks.pipeline --executor-overhead

Sleeping stages overlap also where there are fewer cores than ranks (use 4 ranks): their times are compared with the
ideal ones of the schedules. `calibrated` multiplies these by what the sleeps of a rank took alone, over what was asked
for, because every sleep lasts 0.1 ms too long, and longer on a busy machine.

`--executor-overhead` needs no other process: one rank of a pipeline runs on a process group whose transfers do nothing,
and the time of the same passes without an executor is subtracted.
"""

import argparse
import dataclasses
import gc
import itertools
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as torch_schedules
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.core.types import TensorSpec
from d9d.pipelining.actions import Program, flat_actions
from d9d.pipelining.api import PipelineSchedule, PipelineStageInfo
from d9d.pipelining.executor import PipelineScheduleExecutor
from d9d.pipelining.factory import (
    AnyPipelineScheduleConfig,
    PipelineSchedule1F1BConfig,
    PipelineScheduleDualPipeVConfig,
    PipelineScheduleGPipeConfig,
    PipelineScheduleLoopedBFSConfig,
    PipelineScheduleZeroBubbleVConfig,
    build_program_builder_from,
    build_schedule,
)
from d9d.pipelining.p2p import _Works  # pyright: ignore[reportPrivateUsage]
from d9d.pipelining.stage import _Agreement  # pyright: ignore[reportPrivateUsage]
from d9d.pipelining.timeline import ActionCosts, simulate
from d9d.pipelining.transfer import BoundarySpec
from tests.benchmarks.pipeline_peers import (
    compute_alone,
    full_passes,
    gpipe_order,
    hosted_stages,
    minimal_competitor,
    one_f_one_b_order,
    torch_competitor,
)
from tests.benchmarks.pipeline_stages import (
    STAGE_KINDS,
    Competitor,
    Pack,
    StageKind,
    build_stage,
    check_same_work,
)

Order = Callable[[int, int, int], Iterable[tuple[str, int]]]
TorchSchedule = type[torch_schedules.PipelineScheduleSingle] | type[torch_schedules.PipelineScheduleMulti]
Bubble = Callable[[float, float, float], float]

COMPETITORS = ("ours", "torch", "minimal")
STEPS_PER_ROUND = {"tiny": 30, "transformer": 4, "sleep": 3}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One schedule as ours, as torch's and as a minimal loop.

    Attributes:
        bubble: Idle time of a step for each further rank, of the forward, input gradient and weight gradient times of
            all layers of a rank. None: there is no closed form, and our program is simulated.
        baseline: Another case, whose schedule by us is measured too.
    """

    config: AnyPipelineScheduleConfig
    torch_schedule: TorchSchedule
    bubble: Bubble | None
    minimal_order: Order | None = None
    stages_per_rank: int = 1
    is_v: bool = False
    baseline: str | None = None

    def program(self, num_microbatches: int, num_ranks: int) -> Program:
        return build_program_builder_from(self.config).compose(num_microbatches=num_microbatches, pp_size=num_ranks)

    def ideal_s(self, kind: StageKind, num_microbatches: int, num_ranks: int) -> float:
        """Return the time of a step without costs of transfers and of the host."""
        f = i = w = kind.sleep_s
        if self.bubble is not None:
            return num_microbatches * (f + i + w) + (num_ranks - 1) * self.bubble(f, i, w)
        stages = self.stages_per_rank
        costs = ActionCosts(forward=f / stages, backward_input=i / stages, backward_weight=w / stages)
        return simulate(self.program(num_microbatches, num_ranks), costs).makespan

    def hosted(self, rank: int, num_ranks: int) -> list[int]:
        num_stages = self.stages_per_rank * num_ranks
        return hosted_stages(rank=rank, num_ranks=num_ranks, num_stages=num_stages, is_v=self.is_v)


def _one_f_one_b_config(stages_per_rank: int, *, zero_bubble: bool) -> PipelineSchedule1F1BConfig:
    return PipelineSchedule1F1BConfig(num_stages_per_rank=stages_per_rank, zero_bubble=zero_bubble)


# Sources of the closed forms: GPipe and 1F1B, also interleaved: Narayanan et al. 2021, section 2.2. ZB1P: Qi et al. 2023,
# table 1 (ZB-H1). ZBV: Qi et al. 2024: the last rank waits for half a forward pass of each rank before, and for nothing
# else. DualPipeV has one for passes that overlap on a device, which those that sleep do not.
CASES = {
    "gpipe": Case(
        config=PipelineScheduleGPipeConfig(),
        torch_schedule=torch_schedules.ScheduleGPipe,
        bubble=lambda f, i, w: f + i + w,
        minimal_order=gpipe_order,
    ),
    "1f1b": Case(
        config=_one_f_one_b_config(1, zero_bubble=False),
        torch_schedule=torch_schedules.Schedule1F1B,
        bubble=lambda f, i, w: f + i + w,
        minimal_order=one_f_one_b_order,
    ),
    "zb1p": Case(
        config=_one_f_one_b_config(1, zero_bubble=True),
        torch_schedule=torch_schedules.ScheduleInterleavedZeroBubble,
        bubble=lambda f, i, w: f + i - w,
        minimal_order=one_f_one_b_order,
        baseline="1f1b",
    ),
    "looped_bfs": Case(
        config=PipelineScheduleLoopedBFSConfig(num_stages_per_rank=2),
        torch_schedule=torch_schedules.ScheduleLoopedBFS,
        bubble=lambda f, i, w: (f + i + w) / 2,
        stages_per_rank=2,
    ),
    "interleaved_1f1b": Case(
        config=_one_f_one_b_config(2, zero_bubble=False),
        torch_schedule=torch_schedules.ScheduleInterleaved1F1B,
        bubble=lambda f, i, w: (f + i + w) / 2,
        stages_per_rank=2,
    ),
    "interleaved_zb": Case(
        config=_one_f_one_b_config(2, zero_bubble=True),
        torch_schedule=torch_schedules.ScheduleInterleavedZeroBubble,
        bubble=lambda f, i, w: (f + i - w) / 2,
        stages_per_rank=2,
        baseline="interleaved_1f1b",
    ),
    "zero_bubble_v": Case(
        config=PipelineScheduleZeroBubbleVConfig(),
        torch_schedule=torch_schedules.ScheduleZBVZeroBubble,
        bubble=lambda f, i, w: f / 2,
        stages_per_rank=2,
        is_v=True,
    ),
    "dual_pipe_v": Case(
        config=PipelineScheduleDualPipeVConfig(),
        torch_schedule=torch_schedules.ScheduleDualPipeV,
        bubble=None,
        stages_per_rank=2,
        is_v=True,
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What all competitors of a run have in common."""

    context: DistributedContext
    kind: StageKind
    pack: Pack
    competitors: list[str]

    def build(self, case: Case) -> dict[str, Competitor]:
        """Build the chosen competitors that the case has."""
        rank, num_ranks = self.context.rank, self.context.world_size
        num_stages = case.stages_per_rank * num_ranks
        built: dict[str, Competitor] = {}
        if "ours" in self.competitors:
            built["ours"] = self._ours(case)
            if case.baseline is not None:
                built[f"ours {case.baseline}"] = self._ours(CASES[case.baseline])
        if "torch" in self.competitors:
            hosted = case.hosted(rank, num_ranks)
            built["torch"] = torch_competitor(case.torch_schedule, self.kind, self.pack, hosted, num_stages)
        if "minimal" in self.competitors and case.minimal_order is not None:
            order = case.minimal_order(len(self.pack), rank, num_ranks)
            built["minimal"] = minimal_competitor(self.kind, self.pack, order)
        return built

    def _ours(self, case: Case) -> Competitor:
        stages: dict[int, nn.Module] = {}

        def provide(stage: PipelineStageInfo) -> nn.Module:
            module = build_stage(self.kind, stage.current_stage, stage.num_stages, self.context.world_size)
            stages[stage.current_stage] = module
            return module

        info, _ = build_schedule(self.context, case.config, provide)
        if dist.get_backend() == "fake":
            agree_alone(info.schedule, self.kind)
        inputs, shared = tuple(self.pack.inputs), (None,) * len(self.pack)
        losses: list[torch.Tensor] = []

        def callback(output: torch.Tensor, index: int) -> torch.Tensor:
            loss = F.mse_loss(output, self.pack.targets[index])
            losses.append(loss.detach())
            return loss

        def run() -> list[torch.Tensor]:
            losses.clear()
            info.schedule.step(inputs, shared, callback)
            return losses

        return Competitor(run, stages)


def agree_alone(schedule: PipelineSchedule[Any, Any, Any], kind: StageKind) -> None:
    """Tell the stages what the ones before them would say in the first step, where there are none."""
    assert isinstance(schedule, PipelineScheduleExecutor)
    sent = BoundarySpec(TensorSpec(shape=kind.shape, dtype=torch.float32))
    for stage in schedule._stages.values():  # pyright: ignore[reportPrivateUsage]
        agreement = _Agreement(torch.empty(0), _Works([]), flags=[True])
        stage._agreed_incoming[sent.kind] = agreement  # pyright: ignore[reportPrivateUsage]


def time_steps(competitors: dict[str, Competitor], *, num_steps: int, num_rounds: int) -> dict[str, list[float]]:
    """Return, per competitor and round, the 20th percentile of the times of single steps in seconds.

    Competitors take turns step by step, in an order that each round reverses. All ranks start a step together and its
    time is that of the slowest rank, so that no step hides in the next one. The percentile leaves out steps that other
    processes have interrupted.
    """
    for competitor in competitors.values():
        for _ in range(2):
            competitor.run()
            competitor.zero_grad()
    times: dict[str, list[float]] = {name: [] for name in competitors}
    for index in range(num_rounds):
        names = list(competitors)[:: 1 if index % 2 == 0 else -1]
        gc.collect()
        gc.disable()
        durations = torch.tensor([[_time_step(competitors[name]) for name in names] for _ in range(num_steps)])
        gc.enable()
        dist.all_reduce(durations, op=dist.ReduceOp.MAX)
        for name, measured in zip(names, durations.T.tolist(), strict=True):
            times[name].append(sorted(measured)[num_steps // 5])
    return times


def _time_step(competitor: Competitor) -> float:
    dist.barrier()
    start = time.perf_counter()
    competitor.run()
    duration = time.perf_counter() - start
    competitor.zero_grad()
    return duration


def format_ratio(measured: Iterable[float], baseline: Iterable[float]) -> str:
    """Write median, 10th and 90th percentile of the ratios of rounds."""
    ratios = sorted(a / b for a, b in zip(measured, baseline, strict=True))
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    return f"{statistics.median(ratios):6.3f} [{low:.3f} .. {high:.3f}]"


def report(title: str, times: dict[str, list[float]]) -> None:
    """Print the times, and each as a ratio to each of those after it."""
    print(title)
    for name, measured in times.items():
        print(f"  {name:36s} {statistics.median(measured) * 1e3:9.3f} ms")
    for name, baseline in itertools.combinations(times, 2):
        print(f"  {f'{name} / {baseline}':36s} {format_ratio(times[name], times[baseline])}")


def report_ideal(ideal_s: float, busy_s: float, times: dict[str, list[float]], alone: list[float]) -> None:
    """Print times of sleeping stages as ratios to the ideal, as it is and calibrated by compute alone."""
    print(f"  {'ideal':36s} {ideal_s * 1e3:9.3f} ms")
    calibrated = [ideal_s * alone_s / busy_s for alone_s in alone]
    for name, measured in times.items():
        print(f"  {f'{name} / ideal':36s} {format_ratio(measured, [ideal_s] * len(measured))}")
        print(f"  {f'{name} / ideal, calibrated':36s} {format_ratio(measured, calibrated)}")


def compare(run: Run, name: str, *, num_rounds: int, num_steps: int) -> None:
    """Check that the competitors of a case do the same work, time them and print the ratios on rank 0."""
    case, kind, pack = CASES[name], run.kind, run.pack
    rank, num_ranks = run.context.rank, run.context.world_size
    num_stages = case.stages_per_rank * num_ranks
    competitors = run.build(case)
    for competitor in competitors.values():
        check_same_work(competitor, kind, num_stages, num_ranks, pack)
    if kind.sleep_s:
        # Full passes also where the schedule splits them: the total is the same.
        actions = full_passes(case.hosted(rank, num_ranks), len(pack))
        competitors["alone"] = compute_alone(kind, pack, actions, num_stages)
    times = time_steps(competitors, num_steps=num_steps, num_rounds=num_rounds)
    alone = times.pop("alone", None)
    if rank != 0:
        return
    report(f"{name}, {kind.name} stages, {num_ranks} ranks, {len(pack)} microbatches", times)
    if alone is not None:
        of_case = {key: measured for key, measured in times.items() if not key.startswith("ours ")}
        if case.baseline is not None:
            of_case.pop("minimal", None)  # the order of the baseline
        busy_s = 3 * kind.sleep_s * len(pack)
        report_ideal(case.ideal_s(kind, len(pack), num_ranks), busy_s, of_case, alone)


def measure_overhead(run: Run, name: str, *, num_rounds: int, num_steps: int) -> None:
    """Print what an executor adds to the passes of a rank, in microseconds per action."""
    case, rank, num_ranks = CASES[name], run.context.rank, run.context.world_size
    actions = list(flat_actions(case.program(len(run.pack), num_ranks)[rank]))
    competitors = run.build(case)
    competitors["alone"] = compute_alone(run.kind, run.pack, actions, case.stages_per_rank * num_ranks)
    times = time_steps(competitors, num_steps=num_steps, num_rounds=num_rounds)
    alone = times.pop("alone")
    num_actions = len(actions)
    print(f"{name}, rank {rank} of {num_ranks}, {len(run.pack)} microbatches, {num_actions} actions")
    print(f"  {'compute alone':36s} {statistics.median(alone) * 1e3:9.3f} ms")
    for competitor, measured in times.items():
        if competitor.startswith("ours ") or (competitor == "minimal" and case.baseline is not None):
            continue  # schedules with another number of actions
        added = sorted(
            (with_s - without_s) / num_actions * 1e6 for with_s, without_s in zip(measured, alone, strict=True)
        )
        low, high = added[len(added) // 10], added[-1 - len(added) // 10]
        print(f"  {competitor:36s} {statistics.median(added):9.2f} us an action  [{low:.2f} .. {high:.2f}]")


def build_run(arguments: argparse.Namespace) -> Run:
    if arguments.executor_overhead:
        # `d9d` uses a process group that exists already.
        dist.init_process_group("fake", store=FakeStore(), rank=arguments.rank, world_size=arguments.ranks)
        num_ranks, kind = arguments.ranks, STAGE_KINDS["tiny"]
    else:
        num_ranks, kind = int(os.environ["WORLD_SIZE"]), STAGE_KINDS[arguments.stage]
        if kind.sleep_s:
            kind = dataclasses.replace(kind, sleep_s=arguments.sleep_ms / 1e3)
    context = DeviceMeshParameters(pipeline_parallel=num_ranks).build(logging.WARNING)
    num_microbatches = arguments.microbatches or max(8, 4 * num_ranks)
    return Run(context=context, kind=kind, pack=Pack.build(kind, num_microbatches), competitors=arguments.competitors)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", choices=list(STAGE_KINDS), default="tiny")
    parser.add_argument("--schedules", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--competitors", nargs="+", choices=COMPETITORS, default=list(COMPETITORS))
    parser.add_argument("--microbatches", type=int, help="default: 8 for 2 ranks, 4 a rank for more")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="of each competitor in a round")
    parser.add_argument("--sleep-ms", type=float, default=10.0, help="forward pass of a rank, for --stage sleep")
    parser.add_argument("--executor-overhead", action="store_true")
    parser.add_argument("--ranks", type=int, default=4, help="of the pipeline, for --executor-overhead")
    parser.add_argument("--rank", type=int, default=1, help="that is measured, for --executor-overhead")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    run = build_run(arguments)
    measure = measure_overhead if arguments.executor_overhead else compare
    num_steps = arguments.steps or STEPS_PER_ROUND[run.kind.name]
    for name in arguments.schedules:
        measure(run, name, num_rounds=arguments.rounds, num_steps=num_steps)


if __name__ == "__main__":
    main()
