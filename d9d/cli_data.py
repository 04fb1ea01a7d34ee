"""``python -m d9d data``: the samples that the steps and ranks of a job read, from its config file alone."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["HELP", "add_arguments", "describe"]

HELP = """Shows, without data or model, what a job reads: steps, epochs, lanes, the numbers of data-parallel ranks that it can
start and resume on, samples per rank, padding, and the first samples.

CONFIG is the YAML file of the job, with the settings of AutoDataProvider under `data` (or only these). Its mesh and
schedule.total_steps count, if it has them. The number of samples is data.num_samples, or that of --num-samples; without
either, formulas stand for what follows from it.

The exit status is 0, or 1 if the job cannot run on one of the --dp.

  python -m d9d data plan config.yaml --dp 1,2,4,8
  python -m d9d data plan config.yaml --dp 1,2,4,8 --num-samples 65536"""

_LOOPS = ("trainer", "inference")

T = TypeVar("T", bound="BaseModel")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words after ``python -m d9d data``."""
    parser.add_argument("action", choices=["plan"], help="what to show")
    parser.add_argument("config", type=Path, metavar="CONFIG", help="config file of the job")
    parser.add_argument(
        "--num-samples", type=int, metavar="N", help="samples of the dataset (default: num_samples of the config)"
    )
    parser.add_argument(
        "--dp",
        type=_sizes,
        metavar="D,...",
        help="numbers of data-parallel ranks (default: that of the mesh, and all valid)",
    )


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of ranks, such as 1,2,4")
    return sizes


def describe(args: argparse.Namespace) -> tuple[str, bool]:
    """Return the text to show, and whether the job cannot run on a number of ranks that was asked for.

    Raises:
        ValueError: The config is wrong, or does not fit the dataset; names all problems.
        OSError: It cannot be read.
    """
    from d9d.core.config import listed
    from d9d.core.dist_context import DeviceMeshParameters
    from d9d.core.yaml_file import read_yaml
    from d9d.dataset.lanes.plan import MAX_LISTED
    from d9d.loop.auto.data import ANY_NUM_SAMPLES, AutoDataConfig, build_data_plan, rank_problems
    from d9d.loop.auto.data_report import describe_data
    from d9d.loop.config import JobScheduleConfig

    document = read_yaml(args.config)
    if not isinstance(document, dict):
        raise ValueError(f"{args.config} must hold settings by name.")
    job: dict[str, Any] = document if "data" in document else {"data": document}
    problems: list[str] = []
    config = _read(AutoDataConfig, job["data"], "data", problems)
    mesh = _read(DeviceMeshParameters, job.get("mesh", {}), "mesh", problems) if "data" in document else None
    schedule = _read(JobScheduleConfig, *_schedule_of(job, problems), problems)
    if config is None or schedule is None or problems:
        raise ValueError(f"{args.config}: {listed(problems)}")
    num_samples = config.num_samples if args.num_samples is None else args.num_samples
    any_plan = build_data_plan(config, ANY_NUM_SAMPLES if num_samples is None else num_samples)
    valid = any_plan.valid_dp_sizes[-MAX_LISTED:]
    own = set[int]() if mesh is None else {mesh.data_parallel}
    dp_sizes: list[int] = args.dp or sorted(own.union(valid))
    text = describe_data(config, num_samples, dp_sizes, schedule.total_steps)
    return text, any(rank_problems(config, dp_size) for dp_size in dp_sizes)


# Any: a config file holds what its author wrote.
def _read(kind: type[T], settings: Any, where: str, problems: list[str]) -> T | None:  # noqa: ANN401
    """Read settings, or note what is wrong with them."""
    from pydantic import ValidationError

    from d9d.core.config import config_problems

    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        problems.extend(config_problems(error, kind, settings, where))
    return None


def _schedule_of(job: dict[str, Any], problems: list[str]) -> tuple[Any, str]:
    """Return the settings of the schedule and where they stand."""
    for name in _LOOPS:
        loop = job.get(name) or {}
        if not isinstance(loop, dict):
            problems.append(f"{name}: must hold settings by name")
        elif "schedule" in loop:
            return loop["schedule"], f"{name}.schedule"
    return {}, "schedule"
