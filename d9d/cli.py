"""The command line, `python -m d9d <command>`. Only commands that need torch import it, so the others start at once."""

import argparse
import dataclasses
import fnmatch
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from typing_extensions import override

from d9d import cli_checkpoint, cli_data
from d9d.core.module_names import did_you_mean
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

_CONVERT_HELP = """Writes a model state (.safetensors files, in the layout of any tool) in another layout, dtype or number of
files.

The mapper is a function that returns a ModelStateMapper. It takes no argument, or one called `names`: the names of all
tensors of SRC, sorted. Its module is looked up as by `python -m`, so modules of the current folder are found. Without
--mapper every tensor keeps its name.

Tensors are streamed: memory holds what the mapper needs together, times the number of workers. Before anything is
written, the mapper is tried on the names and shapes of SRC. A conversion that fails leaves nothing that looks complete.

  python -m d9d convert llama/ llama-fused/ --mapper my_model.mappers:from_huggingface --workers 4
  python -m d9d convert llama/ llama-bf16/ --dtype bf16 --shard-size 2GB"""

_INSPECT_HELP = """Lists the files and tensors of a model state (.safetensors files), and all that is wrong with it: what is
missing, damaged, there twice, not named by the index, left by a killed export, or not what the manifest says.
With --mapper, shows what a mapper would make of it, too, and why it would fail. Reads no weights, but for checksums.

The exit status is 0 if all is well and 1 if something is wrong.

  python -m d9d inspect llama/ --names '*.norm.weight'
  python -m d9d inspect llama/ --mapper my_model.mappers:from_huggingface"""

_WORD = r"[\w-]+"
_MAPPER_FORM = "pkg.module:function"
_DTYPES = ("bf16", "fp16", "fp32", "fp64", "fp8_e4m3", "fp8_e5m2")
_SIZE_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

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
    parser = _Parser(prog="python -m d9d", description="Distributed training for PyTorch.")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    summaries = (
        ("pipeline", "show the program of a pipeline schedule: its timeline, bubble and memory", _PIPELINE_HELP),
        ("convert", "write a model state in another layout, dtype or number of files", _CONVERT_HELP),
        ("inspect", "list what a model state holds, and what is wrong with it", _INSPECT_HELP),
        ("data", "show which samples the steps and ranks of a job read", cli_data.HELP),
        ("checkpoint", "list, verify, show and compare training checkpoints", cli_checkpoint.HELP),
    )
    raw = argparse.RawDescriptionHelpFormatter
    parsers = [
        commands.add_parser(name, help=summary, description=description, formatter_class=raw)
        for name, summary, description in summaries
    ]
    pipeline, convert, inspect, data, checkpoint = parsers
    _add_pipeline_arguments(pipeline)
    _add_convert_arguments(convert)
    _add_inspect_arguments(inspect)
    cli_data.add_arguments(data)
    cli_checkpoint.add_arguments(checkpoint)
    args, others = parser.parse_known_args(argv)
    if others:
        next(each for each in parsers if each.prog.endswith(f" {args.command}")).refuse(others)
    match args.command:
        case "convert":
            return _run_convert(convert, args)
        case "inspect":
            return _run_inspect(inspect, args)
        case "data":
            return _run_described(data, args, cli_data.describe)
        case "checkpoint":
            return _run_described(checkpoint, args, cli_checkpoint.describe)
        case _:
            return _run_pipeline(pipeline, args)


class _Parser(argparse.ArgumentParser):
    """Names the nearest command, choice or option where one is not known."""

    @override
    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message)
        super().error(message if wrong is None else f"{message}.{did_you_mean(wrong[1], re.findall(_WORD, wrong[2]))}")

    def refuse(self, others: Sequence[str]) -> NoReturn:
        """End with what is not understood."""
        known = re.findall(r"--[\w-]+", self.format_help())
        hints = [did_you_mean(word, known) for word in others if word.startswith("-")]
        self.error(f"unrecognized arguments: {' '.join(others)}.{''.join(hints)}")


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


def _fail(parser: argparse.ArgumentParser, reason: str, status: int = 2) -> NoReturn:
    """End for a reason that a look at the usage would not mend."""
    parser.exit(status, f"{parser.prog}: error: {reason}\n")


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


def _add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", type=Path, metavar="SRC", help="model state to read: a folder, or one file")
    parser.add_argument("dst", type=Path, metavar="DST", help="folder to write, which is made")
    parser.add_argument("--mapper", metavar=_MAPPER_FORM, help="function that returns the mapper (default: keep names)")
    parser.add_argument(
        "--shard-size",
        type=_gigabytes,
        default=4.0,
        metavar="SIZE",
        help=f"largest size of a file, as 500MB; units are {', '.join(_SIZE_UNITS)} (default: 4GB)",
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="store floating point tensors in this dtype (default: each in its own)"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes to convert with (default: 1)")
    parser.add_argument("--manifest", action="store_true", help="write checksums (sha256) of the files beside them")
    parser.add_argument("--overwrite", action="store_true", help="replace a model state that is in DST already")
    _add_source_arguments(parser)


def _add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", type=Path, metavar="DIR", help="model state: a folder, or one file")
    parser.add_argument(
        "--names", default="*", metavar="PATTERN", help="show and count only these tensors, as '*.bias'"
    )
    parser.add_argument("--mapper", metavar=_MAPPER_FORM, help="show what the mapper of this function would make of it")
    parser.add_argument("--no-checksums", action="store_true", help="do not read the files to compare their checksums")
    _add_source_arguments(parser)


def _add_source_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-root", type=Path, metavar="DIR", help="folder that links may lead to, as that of a download cache"
    )
    parser.add_argument(
        "--allow-bin", action="store_true", help="read pytorch_model.bin, plain tensors only, where nothing else is"
    )


def _gigabytes(text: str) -> float:
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_SIZE_UNITS)})", text.strip(), re.IGNORECASE)
    units = {unit.lower(): size for unit, size in _SIZE_UNITS.items()}
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size above 0 with a unit, such as 500MB or 4GB")
    return float(match[1]) * units[match[2].lower()] / 1e9


def _run_convert(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from d9d.model_state.convert import DTYPES, Conversion, convert_model_state

    conversion = Conversion(
        src_dir=args.src,
        dest_dir=args.dst,
        mapper=args.mapper,
        shard_size_gb=args.shard_size,
        dtype=DTYPES[args.dtype] if args.dtype else None,
        num_workers=args.workers,
        manifest=args.manifest,
        overwrite=args.overwrite,
        cache_root=args.cache_root,
        allow_bin=args.allow_bin,
    )
    try:
        result = convert_model_state(conversion)
    except (ValueError, OSError, RuntimeError) as error:
        _fail(parser, str(error))
    except KeyboardInterrupt:
        _fail(parser, f"interrupted; what is in {args.dst} is not complete.", status=130)
    _write(str(result))
    return 0


def _run_inspect(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from d9d.model_state.inspection import dry_run, format_dry_run, format_inspection, inspect_model_state
    from d9d.model_state.mapper_reference import load_mapper

    parts: list[str] = []
    try:
        inspection = inspect_model_state(
            args.dir, cache_root=args.cache_root, allow_bin=args.allow_bin, verify=not args.no_checksums
        )
        if inspection.tensors and not fnmatch.filter([info.name for info in inspection.tensors], args.names):
            raise ValueError(f"no tensor of {args.dir} fits --names {args.names!r}.")
        parts.append(format_inspection(inspection, args.names))
        is_wrong = bool(inspection.problems)
        if args.mapper is not None:
            tensors = {info.name: info for info in inspection.tensors}
            mapper = load_mapper(args.mapper, sorted(tensors))
            run = dry_run(mapper, tensors)
            parts.append(format_dry_run(mapper, run))
            is_wrong |= bool(run.problems)
    except (ValueError, OSError) as error:
        _fail(parser, str(error))
    _write("\n\n".join(parts))
    return int(is_wrong)


def _run_described(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    describe: Callable[[argparse.Namespace], tuple[str, bool]],
) -> int:
    try:
        text, is_wrong = describe(args)
    except (ValueError, OSError) as error:
        _fail(parser, str(error))
    _write(text)
    return int(is_wrong)


def _write(text: str) -> None:
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Who reads, such as `head`, has enough. The interpreter flushes again at its end, and must not fail then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
