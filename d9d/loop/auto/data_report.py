"""What a data config makes of a dataset, as text: steps, epochs, ranks, and the samples that come first."""

import bisect
from collections.abc import Sequence

from d9d.dataset.lanes import DataPlan, Tail
from d9d.dataset.lanes.plan import listed
from d9d.loop.auto.data import ANY_NUM_SAMPLES, AutoDataConfig, build_data_plan, rank_problems
from d9d.loop.component.job_schedule import too_many_steps

__all__ = ["describe_data"]

_ANY_NUM_STEPS = 2**40
_NUM_FIRST_STEPS = 2
_NUM_SHOWN_MICROBATCHES = 4
_NUM_SHOWN_SAMPLES = 8


def describe_data(
    config: AutoDataConfig, num_samples: int | None, dp_sizes: Sequence[int], total_steps: int | None = None
) -> str:
    """Describe the data of a run.

    Args:
        config: Settings of the data.
        num_samples: Samples of the dataset; None if their number is not known, and formulas shall stand for it. It does not
            matter for mixtures and packed sequences, which have no end.
        dp_sizes: Numbers of data-parallel ranks to look at.
        total_steps: Steps of the job; None for as many as the data has.

    Raises:
        ValueError: Config and dataset do not fit together, or the job wants more steps than there are.
    """
    plan = build_data_plan(config, ANY_NUM_SAMPLES if num_samples is None else num_samples)
    is_known = num_samples is not None and not (config.mixture or config.packing)
    available = plan.total_steps if is_known else None
    if total_steps is not None and available is not None and total_steps > available:
        raise ValueError(too_many_steps(total_steps, available))
    num_steps = available if total_steps is None else total_steps
    sections = [
        _totals(config, plan, num_steps, is_known=is_known),
        _ranks(config, plan, dp_sizes, num_steps, is_known=is_known),
        *([_first_samples(plan, num_steps)] if is_known else []),
    ]
    return "\n\n".join(sections)


def _totals(config: AutoDataConfig, plan: DataPlan, num_steps: int | None, *, is_known: bool) -> str:
    size = plan.schedule.global_batch_size(0)
    order = f"shuffled anew in each epoch (seed {plan.seed})" if plan.shuffle else "in the order of the dataset"
    ramp = "".join(f", {point}" for point in plan.schedule.ramp[1:])
    rows = {
        "samples": f"{plan.num_samples if is_known else _samples_of_unknown(config)}, {order}",
        "step": f"{size} samples in {size // plan.microbatch_size} microbatches of {plan.microbatch_size}{ramp}",
        "epoch": _epoch(plan) if is_known else _epoch_of_unknown(config, plan),
        "run": _run(plan, num_steps) if is_known else _run_of_unknown(config, plan, num_steps),
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


def _samples_of_unknown(config: AutoDataConfig) -> str:
    total = sum(config.mixture.values())
    shares = " and ".join(f"{weight} of {total} from {name}" for name, weight in sorted(config.mixture.items()))
    if config.packing is not None:
        sequences = f"sequences of {config.packing.num_tokens} tokens ({config.packing.kind}) out of documents"
        return f"{sequences}, {shares}" if shares else sequences
    return shares or "N (give num_samples in the config or --num-samples to see numbers)"


def _epoch_of_unknown(config: AutoDataConfig, plan: DataPlan) -> str:
    """Return the text of `_epoch` for N samples."""
    if config.packing is not None:
        return "as many sequences as its documents make"
    if config.mixture:
        return "each dataset goes through epochs of its own"
    size = plan.schedule.global_batch_size(0)
    match plan.tail:
        case Tail.wrap:
            return f"{f'N / {size} steps' if plan.schedule.is_constant else 'N samples'}; no padding, the next follows"
        case Tail.drop:
            return f"floor(N / {size}) steps; no padding, N mod {size} samples are left out"
        case Tail.pad:
            return f"ceil(N / {size}) steps; -N mod {size} samples come twice, the second time with weight 0"
        case Tail.short:
            return f"ceil(N / {size}) steps, the last one with N mod {size} samples if that is not 0; no padding"


def _run(plan: DataPlan, num_steps: int | None) -> str:
    if num_steps is None:
        return "no end: set schedule.total_steps"
    epochs = plan.schedule.consumed(num_steps) / plan.order.epoch_length
    return f"{num_steps} steps, {epochs:.6g} epochs"


def _run_of_unknown(config: AutoDataConfig, plan: DataPlan, num_steps: int | None) -> str:
    if num_steps is not None and (config.mixture or config.packing):
        return f"{num_steps} steps"
    if num_steps is not None:
        num_positions = plan.schedule.consumed(num_steps)
        of_epoch = {Tail.drop: "floor(N / {0}) * {0}", Tail.wrap: "N"}.get(plan.tail, "ceil(N / {0}) * {0}")
        return f"{num_steps} steps, {num_positions} / ({of_epoch.format(plan.schedule.global_batch_size(0))}) epochs"
    return "no end: set schedule.total_steps" if config.num_epochs is None else f"{config.num_epochs} epochs"


def _ranks(
    config: AutoDataConfig, plan: DataPlan, dp_sizes: Sequence[int], num_steps: int | None, *, is_known: bool
) -> str:
    lines = ["ranks    microbatches per step   samples per rank"]
    for dp_size in dp_sizes:
        problems = rank_problems(config, dp_size)
        if problems:
            lines.append(f"{dp_size:<8d} {' '.join(problems)}")
            continue
        if num_steps is None:
            sizes = ", ".join(str(point.global_batch_size // dp_size) for point in plan.schedule.ramp)
            samples = f"{sizes} per step"
        else:
            samples = _samples_per_rank(plan, dp_size, num_steps)
            if not is_known and plan.tail is Tail.short:
                samples = f"at most {samples}"
        microbatches = _microbatches_per_rank(plan, dp_size, num_steps, is_known=is_known)
        lines.append(f"{dp_size:<8d} {microbatches:<23s} {samples}".rstrip())
    return "\n".join(lines)


def _microbatches_per_rank(plan: DataPlan, dp_size: int, num_steps: int | None, *, is_known: bool) -> str:
    counts = [str(plan.num_microbatches(point.from_step, dp_size)) for point in plan.schedule.ramp]
    short = _short_step(plan, num_steps) if is_known else None
    if short is not None:
        num_idle = plan.num_microbatches(short, dp_size) * dp_size - len(plan.step_samples(short))
        idle = f", {num_idle} idle" if num_idle else ""
        counts.append(f"{plan.num_microbatches(short, dp_size)} in the last{idle}")
    return ", ".join(counts)


def _short_step(plan: DataPlan, num_steps: int | None) -> int | None:
    """Return the first step of the run with fewer samples than its size, or None."""
    num_steps = _ANY_NUM_STEPS if num_steps is None else num_steps
    if not plan.num_short_steps(num_steps):
        return None
    # Counts go up with the number of steps, so the first one that has a short step in it can be searched.
    return bisect.bisect_left(range(num_steps), 1, key=lambda step: plan.num_short_steps(step + 1))


def _samples_per_rank(plan: DataPlan, dp_size: int, num_steps: int) -> str:
    """Return how many samples each rank reads in a run, as a range if they differ."""
    num_short, short = plan.num_short_steps(num_steps), _short_step(plan, num_steps)
    of_whole_steps = sum(
        stretch.num_steps * stretch.global_batch_size // dp_size for stretch in plan.schedule.stretches(num_steps)
    )
    if short is None:
        return str(of_whole_steps)
    missing = plan.schedule.global_batch_size(0) // dp_size
    least, most = (
        of_whole_steps + num_short * (plan.num_read(short, dp_size, rank) - missing) for rank in (dp_size - 1, 0)
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
