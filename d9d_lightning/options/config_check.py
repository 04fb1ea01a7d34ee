"""Find everything that is wrong with the options of the strategy, before any process group exists."""
# Lightning tells notebooks apart by a name of its own
# pyright: reportPrivateUsage=false

import math
from collections.abc import Callable
from typing import Literal, TypeGuard, TypeVar, get_args

import torch.multiprocessing as mp
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.imports import _IS_INTERACTIVE

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.module_names import did_you_mean
from d9d_lightning.model_states.options import ModelStateOptions
from d9d_lightning.options.mesh import MeshOption
from d9d_lightning.options.schedule import schedule_option_problems

__all__ = [
    "LauncherName",
    "option_problems",
    "process_problems",
    "read_or_note",
    "refuse_problems",
    "starts_elsewhere",
]

T = TypeVar("T")

LauncherName = Literal["script", "fork", "spawn"]
"""How further processes start: by running the script again, or as children of this process."""

_LAUNCHERS = get_args(LauncherName)

_CONTEXT_DEGREES = ("context_parallel_replicate", "context_parallel_shard")
"""Degrees that the engine knows and this strategy does not drive yet."""


def option_problems(
    params: DeviceMeshParameters,
    *,
    pipeline_module: object = None,
    schedule: object = "1f1b",
    microbatches: int | None = None,
    has_mp_policy: bool = False,
    launcher: str | None = None,
    bucket_size_mb: object = 32,
    min_unit_params: object = 0,
    timeout_s: object = None,
    init_timeout_s: object = None,
    max_restarts_without_progress: object = 3,
    model_states: ModelStateOptions | None = None,
) -> list[str]:
    """Say all that is wrong with the options of the strategy, whoever runs it: each with its value and how to mend it.

    Args:
        params: Parallelism degrees.
        pipeline_module: Dotted name of the submodule that is cut into stages. Without pipeline parallelism it says nothing,
            so that one script runs on all meshes.
        schedule: See `ScheduleSpec`.
        microbatches: Number of microbatches of a batch; None leaves batches whole.
        has_mp_policy: Whether FSDP is to convert types itself.
        launcher: A `LauncherName`, or None.
        bucket_size_mb: Size of gradient buckets in MiB.
        min_unit_params: Smallest FSDP unit of the default plan.
        timeout_s: Time limit of collectives in seconds; None for the usual one.
        init_timeout_s: The same until the first step is done; None for `timeout_s`.
        max_restarts_without_progress: Restarts in a row that may bring no newer checkpoint.
        model_states: Where weights come from; None keeps those of the module.
    """
    problems = _context_problems(params) + _pipeline_problems(params, pipeline_module, schedule)
    # A bool counts as an int, and is a mistake here.
    if microbatches is not None and (type(microbatches) is not int or microbatches < 1):
        problems.append(f"microbatches ({microbatches!r}) must be a whole number of at least 1, or None.")
    if has_mp_policy and params.has_pipeline_parallel:
        problems.append(
            "mp_policy does not work with pipeline_parallel > 1: stages would send other types than they agree on. Use "
            "precision='bf16-mixed' or 'bf16-true' of the Trainer."
        )
    problems += _number_problems(bucket_size_mb, min_unit_params, timeout_s, init_timeout_s)
    if type(max_restarts_without_progress) is not int or max_restarts_without_progress < 0:
        problems.append(
            f"max_restarts_without_progress ({max_restarts_without_progress!r}) must be a whole number of at least 0."
        )
    if model_states is not None:
        problems += model_states.problems()
    if launcher is not None and launcher not in _LAUNCHERS:
        names = f"{', '.join(_LAUNCHERS[:-1])} or {_LAUNCHERS[-1]}"
        problems.append(f"launcher ({launcher!r}) is not known: choose {names}.{did_you_mean(launcher, _LAUNCHERS)}")
    return problems


def process_problems(
    mesh: MeshOption, environment: ClusterEnvironment, num_devices: int, num_nodes: int, launcher: str | None = None
) -> list[str]:
    """Say what is wrong with the number of processes, and how they start.

    Args:
        mesh: Parallelism degrees.
        environment: Who starts the processes.
        num_devices: Number of processes on each machine.
        num_nodes: Number of machines.
        launcher: A `LauncherName`, or None.
    """
    problems = _environment_problems(environment, num_devices, num_nodes)
    try:
        problems += _size_problems(mesh.fill(num_devices * num_nodes), num_devices, num_nodes)
    except ValueError as error:
        problems.append(str(error))
    if not starts_elsewhere(environment) and num_devices * num_nodes > 1:
        problems += _launcher_problems(launcher, num_nodes)
    return problems


def read_or_note(problems: list[str], read: Callable[..., T], written: object, *others: object) -> T:
    """Read what a user has written; where that fails, note why, and go on as if nothing was written (None)."""
    try:
        return read(written, *others)
    except ValueError as error:
        problems.append(str(error))
        return read(None, *others)


def refuse_problems(problems: list[str], mesh: MeshOption) -> None:
    """Refuse options that cannot be run.

    Args:
        problems: What was found.
        mesh: What it was found with.

    Raises:
        NotImplementedError: If nothing is wrong but degrees that a LightningModule cannot have.
        ValueError: With all problems.
    """
    if not problems:
        return
    if problems == _context_problems(mesh.smallest):
        raise NotImplementedError(problems[0])
    if len(problems) == 1:
        raise ValueError(problems[0])
    raise ValueError("D9DStrategy cannot run as it is configured:\n" + "\n".join(f"- {text}" for text in problems))


def starts_elsewhere(environment: ClusterEnvironment) -> bool:
    """Tell whether torchrun, a cluster or the like has started all processes, and knows how many there are."""
    return environment.creates_processes_externally and not isinstance(environment, LightningEnvironment)


def _environment_problems(environment: ClusterEnvironment, num_devices: int, num_nodes: int) -> list[str]:
    if not starts_elsewhere(environment):
        return []
    launched, wanted = environment.world_size(), num_devices * num_nodes
    if launched != wanted:
        return [
            (
                f"{type(environment).__name__} says that {launched} processes were started, but "
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}) asks for {wanted}. "
                f"Set devices to the number of processes per node ({launched} / num_nodes), "
                f"or start {wanted} processes (torchrun --nproc-per-node {num_devices})."
            )
        ]
    try:
        environment.validate_settings(num_devices=num_devices, num_nodes=num_nodes)
    except ValueError as error:
        return [str(error)]
    return []


def _size_problems(params: DeviceMeshParameters, num_devices: int, num_nodes: int) -> list[str]:
    num_processes = num_devices * num_nodes
    if params.world_size == num_processes:
        return []
    degrees = " x ".join(f"{name} {degree}" for name, degree in params.model_dump().items() if degree > 1)
    chosen = "data_parallel_replicate" if params.has_data_parallel_replicate else "data_parallel_shard"
    example = {chosen: num_processes} if num_processes > 1 else {}
    return [
        (
            f"The mesh needs {params.world_size} processes ({degrees or 'all degrees are 1'}), but "
            f"Trainer(devices={num_devices}, num_nodes={num_nodes}) runs {num_processes}. "
            f"Set devices={max(1, params.world_size // num_nodes)}, or a mesh of {num_processes}, e.g. mesh={example}, or "
            f"leave one degree open (-1)."
        )
    ]


def _context_problems(params: DeviceMeshParameters) -> list[str]:
    degrees = params.model_dump()
    refused = [f"{name} ({degrees[name]})" for name in _CONTEXT_DEGREES if degrees[name] > 1]
    if not refused:
        return []
    return [
        (
            f"D9DStrategy does not support {', '.join(refused)}: training_step gets whole sequences, and computes losses and "
            f"metrics of them, which nobody could cut for it. Set it to 1, and use data_parallel_replicate, "
            f"data_parallel_shard, tensor_parallel, expert_parallel and pipeline_parallel; or train with the native Trainer."
        )
    ]


def _pipeline_problems(params: DeviceMeshParameters, pipeline_module: object, schedule: object) -> list[str]:
    problems = schedule_option_problems(schedule)
    if not (pipeline_module is None or (isinstance(pipeline_module, str) and all(pipeline_module.split(".")))):
        problems.append(f"pipeline_module ({pipeline_module!r}) must be the dotted name of a submodule.")
    if params.has_pipeline_parallel and pipeline_module is None:
        problems.append(
            f"pipeline_parallel ({params.pipeline_parallel}) needs pipeline_module, the dotted name of the submodule "
            f"that is cut into stages: D9DStrategy(..., pipeline_module='model'), or for a name of a strategy "
            f"d9d_lightning.register('pp{params.pipeline_parallel}', pipeline_module='model')."
        )
    return problems


def _number_problems(
    bucket_size_mb: object, min_unit_params: object, timeout_s: object, init_timeout_s: object
) -> list[str]:
    problems: list[str] = []
    if not _is_number(bucket_size_mb) or bucket_size_mb <= 0:
        problems.append(f"bucket_size_mb ({bucket_size_mb!r}) must be a number of more than 0, in MiB.")
    if not _is_number(min_unit_params) or min_unit_params < 0:
        problems.append(f"min_unit_params ({min_unit_params!r}) must be a number of at least 0.")
    for name, limit_s in (("timeout_s", timeout_s), ("init_timeout_s", init_timeout_s)):
        if limit_s is not None and (not _is_number(limit_s) or limit_s <= 0):
            problems.append(f"{name} ({limit_s!r}) must be a number of more than 0, in seconds, or None.")
    if init_timeout_s is not None and timeout_s is None:
        problems.append(
            f"init_timeout_s ({init_timeout_s!r}) needs timeout_s, the limit behind the first step. Set both."
        )
    return problems


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _launcher_problems(launcher: str | None, num_nodes: int) -> list[str]:
    if launcher is None or launcher not in _LAUNCHERS:
        return []
    if launcher == "script":
        reason = "a notebook cannot be run again as a script. Use 'fork', or leave launcher out."
        return [f"launcher ('script'): {reason}"] if _IS_INTERACTIVE else []
    problems: list[str] = []
    if launcher not in mp.get_all_start_methods():
        problems.append(f"launcher ({launcher!r}): this system cannot start processes that way.")
    if num_nodes > 1:
        problems.append(
            f"launcher ({launcher!r}) starts processes on one machine, but num_nodes is {num_nodes}. Use 'script', or "
            f"torchrun."
        )
    return problems
