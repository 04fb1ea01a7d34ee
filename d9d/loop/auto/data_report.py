"""What a data config makes of a dataset, as text: steps, epochs, ranks, and the samples that come first."""

from collections.abc import Sequence

from d9d.dataset.lanes import DataPlan, Tail
from d9d.dataset.lanes.plan import listed
from d9d.loop.auto.data import AutoDataConfig, build_data_plan, rank_problems

__all__ = ["describe_data"]

_NUM_FIRST_STEPS = 2
_NUM_SHOWN_MICROBATCHES = 4
_NUM_SHOWN_SAMPLES = 8


def describe_data(
    config: AutoDataConfig, num_samples: int, dp_sizes: Sequence[int], total_steps: int | None = None
) -> str:
    """Describe the data of a run.

    Args:
        config: Settings of the data.
        num_samples: Samples of the dataset.
        dp_sizes: Numbers of data-parallel ranks to look at.
        total_steps: Steps of the job; None for as many as the data has.

    Raises:
        ValueError: Config and dataset do not fit together, or the job wants more steps than there are.
    """
    plan = build_data_plan(config, num_samples)
    available = plan.total_steps
    if total_steps is not None and available is not None and total_steps > available:
        raise ValueError(
            f"schedule.total_steps ({total_steps}) is more than the data has ({available}). Lower it, or raise num_epochs "
            "(null: no end)."
        )
    num_steps = available if total_steps is None else total_steps
    sections = [
        _totals(plan, num_steps),
        _ranks(config, plan, dp_sizes, num_steps),
        _first_samples(plan, num_steps),
    ]
    return "\n\n".join(sections)


def _totals(plan: DataPlan, num_steps: int | None) -> str:
    size = plan.schedule.global_batch_size(0)
    order = f"shuffled anew in each epoch (seed {plan.seed})" if plan.shuffle else "in the order of the dataset"
    ramp = "".join(f", {point}" for point in plan.schedule.ramp[1:])
    rows = {
        "samples": f"{plan.num_samples}, {order}",
        "step": f"{size} samples in {size // plan.microbatch_size} microbatches of {plan.microbatch_size}{ramp}",
        "epoch": _epoch(plan),
        "run": _run(plan, num_steps),
        "lanes": f"{plan.num_lanes}: starts and resumes on {listed(plan.valid_dp_sizes)} data-parallel ranks",
    }
    if plan.is_chunked:
        rows["chunks"] = f"{plan.num_chunks} blocks of neighbours are read in parallel"
    if plan.schedule.skips:
        rows["skipped"] = ", ".join(map(str, plan.schedule.skips))
    return "\n".join(f"{name:8s} {text}" for name, text in rows.items())


def _epoch(plan: DataPlan) -> str:
    order, size = plan.order, plan.schedule.global_batch_size(0)
    steps = f"{order.epoch_length / size:.6g} steps"
    match plan.tail:
        case Tail.wrap:
            return (
                f"{steps if plan.schedule.is_constant else f'{plan.num_samples} samples'}; no padding, the next follows"
            )
        case Tail.drop:
            return f"{steps}; no padding, {order.num_dropped} samples are left out"
        case Tail.pad:
            return f"{steps}; {order.num_padding} samples come twice, the second time with weight 0"
        case Tail.short:
            short = f"the last one with {order.num_in_short_step} samples" if order.num_in_short_step else "all full"
            return f"{steps}, {short}; no padding"


def _run(plan: DataPlan, num_steps: int | None) -> str:
    if num_steps is None:
        return "no end: set schedule.total_steps"
    epochs = plan.schedule.consumed(num_steps) / plan.order.epoch_length
    return f"{num_steps} steps, {epochs:.6g} epochs"


def _ranks(config: AutoDataConfig, plan: DataPlan, dp_sizes: Sequence[int], num_steps: int | None) -> str:
    lines = ["ranks    microbatches per step   samples per rank"]
    for dp_size in dp_sizes:
        problems = rank_problems(config, dp_size)
        if problems:
            lines.append(f"{dp_size:<8d} {' '.join(problems)}")
            continue
        samples = "" if num_steps is None else _samples_per_rank(plan, dp_size, num_steps)
        lines.append(f"{dp_size:<8d} {_microbatches_per_rank(plan, dp_size):<23s} {samples}".rstrip())
    return "\n".join(lines)


def _microbatches_per_rank(plan: DataPlan, dp_size: int) -> str:
    counts = [str(plan.num_microbatches(point.from_step, dp_size)) for point in plan.schedule.ramp]
    short = _short_step(plan)
    if short is not None:
        num_idle = plan.num_microbatches(short, dp_size) * dp_size - len(plan.step_samples(short))
        idle = f", {num_idle} idle" if num_idle else ""
        counts.append(f"{plan.num_microbatches(short, dp_size)} in the last{idle}")
    return ", ".join(counts)


def _short_step(plan: DataPlan) -> int | None:
    """Return the first step with fewer samples than its size."""
    return plan.order.epoch_length // plan.schedule.global_batch_size(0) - 1 if plan.order.num_in_short_step else None


def _samples_per_rank(plan: DataPlan, dp_size: int, num_steps: int) -> str:
    """Return how many samples each rank reads in a run, as a range if they differ."""
    starts = [point.from_step for point in plan.schedule.ramp]
    counts = [
        max(0, min(num_steps, stop) - start) for start, stop in zip(starts, [*starts[1:], num_steps], strict=True)
    ]
    of_whole_steps = sum(
        count * point.global_batch_size // dp_size for count, point in zip(counts, plan.schedule.ramp, strict=True)
    )
    short = _short_step(plan)
    if short is None:
        return str(of_whole_steps)
    missing = plan.schedule.global_batch_size(0) // dp_size
    least, most = (
        of_whole_steps + num_steps // (short + 1) * (plan.num_read(short, dp_size, rank) - missing)
        for rank in (dp_size - 1, 0)
    )
    return str(most) if least == most else f"{least} to {most}"


def _first_samples(plan: DataPlan, num_steps: int | None) -> str:
    lines = ["first samples, by microbatch"]
    for step in range(_NUM_FIRST_STEPS if num_steps is None else min(_NUM_FIRST_STEPS, num_steps)):
        for number, row in enumerate(plan.step_samples(step).tolist()):
            if number == _NUM_SHOWN_MICROBATCHES:
                lines.append(f"step {step + 1}   ...")
                break
            samples = [str(sample) for sample in row if sample >= 0]
            more = " ..." if len(samples) > _NUM_SHOWN_SAMPLES else ""
            lines.append(f"step {step + 1}   {number + 1}: {' '.join(samples[:_NUM_SHOWN_SAMPLES])}{more}")
    return "\n".join(lines)
