"""The command line, `python -m d9d <command>`. It plans jobs and runs none, so it starts without torch."""

import argparse
import dataclasses
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from d9d.pipelining.actions import Program, format_program
from d9d.pipelining.schedules import SCHEDULE_NAMES, build_program_builder, schedule_problems
from d9d.pipelining.timeline import ActionCosts, Timeline, simulate
from d9d.pipelining.visualize import (
    PICTURE_SUFFIXES,
    format_grid,
    format_summary,
    read_measured_timeline,
    write_timeline,
)

__all__ = ["main"]

_PIPELINE_HELP = """Shows what each rank of a pipeline does when, how much of the time it waits (the bubble), and how many
activations it keeps alive. The program is the one that training runs; its times are simulated from the costs of
actions, in any one unit. Or shows a step that the native trainer has measured.

Prints a grid of ranks and time and a summary, and writes a picture."""

_NO_PICTURE = "none"
_PIPE_WIDTH = 120


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Words after ``python -m d9d``; those of the process by default.

    Returns:
        The exit status.

    Raises:
        SystemExit: If the words are wrong (status 2; the message names all problems), or ask for help.
    """
    parser = argparse.ArgumentParser(prog="python -m d9d", description="Distributed training for PyTorch.")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    pipeline = commands.add_parser(
        "pipeline",
        help="show the program of a pipeline schedule: its timeline, bubble and memory",
        description=_PIPELINE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_pipeline_arguments(pipeline)
    return _run_pipeline(pipeline, parser.parse_args(argv))


def _add_pipeline_arguments(parser: argparse.ArgumentParser) -> None:
    program = parser.add_argument_group("program")
    program.add_argument("--schedule", metavar="NAME", help=f"one of {', '.join(SCHEDULE_NAMES)}")
    program.add_argument("--pp", type=int, metavar="P", help="number of pipeline ranks")
    program.add_argument("--microbatches", type=int, metavar="M", help="number of microbatches of a step")
    program.add_argument(
        "--stages-per-rank", type=int, metavar="S", help="number of stages that each rank hosts (default: the least)"
    )
    program.add_argument("--zero-bubble", action="store_true", help="1f1b: compute weight gradients in bubbles")
    program.add_argument(
        "--lookahead",
        type=int,
        metavar="N",
        help="1f1b: forward passes on top of those that fill the pipeline, to hide transfers (default: as in training)",
    )
    costs = parser.add_argument_group("costs of a microbatch in one stage")
    for flag, meaning in (
        ("forward", "forward pass"),
        ("backward-input", "gradients of its inputs"),
        ("backward-weight", "gradients of its weights; a full backward pass takes both"),
    ):
        costs.add_argument(f"--{flag}", type=float, default=1.0, metavar="COST", help=f"{meaning} (default: 1)")
    costs.add_argument(
        "--transfer", type=float, default=0.0, metavar="COST", help="latency from stage to stage (default: 0)"
    )
    shown = parser.add_argument_group("what to show")
    shown.add_argument("--measured", type=Path, metavar="FILE", help="show this step that the native trainer measured")
    shown.add_argument("--program", action="store_true", help="print the program itself, and nothing else")
    shown.add_argument(
        "--output",
        metavar="FILE",
        help=f"picture to write, {' or '.join(PICTURE_SUFFIXES)}, or {_NO_PICTURE} "
        "(default: pipeline-<what>.svg in the current folder; with --program none)",
    )


def _run_pipeline(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    problems = [*_program_problems(args), *_cost_problems(args), *_output_problems(args)]
    if problems:
        _refuse(parser, problems)
    try:
        _show(args, _measured(args) if args.measured else _simulated(args))
    except (ValueError, OSError) as error:
        _refuse(parser, [str(error)])
    return 0


def _refuse(parser: argparse.ArgumentParser, problems: Sequence[str]) -> NoReturn:
    parser.error(problems[0] if len(problems) == 1 else "".join(f"\n  {problem}" for problem in problems))


def _program_problems(args: argparse.Namespace) -> Iterator[str]:
    sizes = {"--schedule": args.schedule, "--pp": args.pp, "--microbatches": args.microbatches}
    if args.measured:
        options = {"--stages-per-rank": args.stages_per_rank, "--lookahead": args.lookahead}
        sizes |= {**options, "--zero-bubble": args.zero_bubble or None}
        if given := [flag for flag, value in sizes.items() if value is not None]:
            yield f"--measured shows a step as it was: leave out {', '.join(given)}."
        return
    if missing := [flag for flag, value in sizes.items() if value is None]:
        yield f"{', '.join(missing)} must be given (or --measured FILE); schedules are {', '.join(SCHEDULE_NAMES)}."
    for flag, size in (("--pp", args.pp), ("--microbatches", args.microbatches)):
        if size is not None and size < 1:
            yield f"{flag} ({size}) must be at least 1."
    if args.schedule is not None:
        yield from schedule_problems(args.schedule, args.stages_per_rank, args.zero_bubble, args.lookahead)


def _cost_problems(args: argparse.Namespace) -> Iterator[str]:
    costs = {"--backward-input": args.backward_input, "--backward-weight": args.backward_weight}
    for flag, cost in {"--forward": args.forward, **costs, "--transfer": args.transfer}.items():
        if not 0 <= cost < math.inf:
            yield f"{flag} ({cost}) must be a number, and not negative."
    if not any((args.forward, *costs.values())):
        yield "one of --forward, --backward-input and --backward-weight must be above 0."


def _output_problems(args: argparse.Namespace) -> Iterator[str]:
    if args.output in (None, _NO_PICTURE):
        return
    path = Path(args.output)
    if path.suffix not in PICTURE_SUFFIXES:
        yield f"--output ({path}) must end in {' or '.join(PICTURE_SUFFIXES)}, or be {_NO_PICTURE}."
    if not path.parent.is_dir():
        yield f"--output ({path}): there is no folder {path.parent}."


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Shown:
    """What a call shows: the program, when it runs, and what to call it."""

    program: Program
    timeline: Timeline
    title: str
    file_stem: str
    unit: str = ""


def _simulated(args: argparse.Namespace) -> _Shown:
    builder = build_program_builder(args.schedule, args.stages_per_rank, args.zero_bubble, args.lookahead)
    program = builder.compose(args.microbatches, args.pp)
    costs = ActionCosts(
        forward=args.forward,
        backward_input=args.backward_input,
        backward_weight=args.backward_weight,
        transfer=args.transfer,
    )
    options = (
        f"{' with zero bubble' * args.zero_bubble}{f', lookahead {args.lookahead}' * (args.lookahead is not None)}"
    )
    stages = builder.num_stages_per_rank
    return _Shown(
        program=program,
        timeline=simulate(program, costs),
        title=f"{args.schedule}{options}: {args.pp} ranks, {stages} stage{'s' * (stages > 1)} each, "
        f"{args.microbatches} microbatches",
        file_stem=f"pipeline-{args.schedule}-pp{args.pp}-mb{args.microbatches}",
    )


def _measured(args: argparse.Namespace) -> _Shown:
    timeline = read_measured_timeline(args.measured)
    return _Shown(
        program={rank: [event.action for event in events] for rank, events in timeline.events.items()},
        timeline=timeline,
        title=f"measured: {args.measured.name}",
        file_stem=f"pipeline-{args.measured.stem}",
        unit="s",
    )


def _show(args: argparse.Namespace, shown: _Shown) -> None:
    if args.program:
        _write(format_program(shown.program))
    else:
        width = shutil.get_terminal_size(fallback=(_PIPE_WIDTH, 24)).columns
        grid = format_grid(shown.timeline, width, shown.unit)
        _write(f"{shown.title}\n\n{grid}\n{format_summary(shown.timeline, shown.unit)}")
    output = args.output or (_NO_PICTURE if args.program else f"{shown.file_stem}.svg")
    if output != _NO_PICTURE:
        write_timeline(shown.timeline, Path(output), shown.title, shown.unit)
        if not args.program:
            _write(f"\npicture: {output}")


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
