"""Which processes a job runs on: how they start, whether they fit the mesh, and how they find each other."""
# Lightning's launchers are its own, and the only ones its trainer knows
# pyright: reportPrivateUsage=false

import contextlib
import logging
import os
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _launch_process_observer
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.core.parent_watch import ends_with_parent

T = TypeVar("T")

_LAUNCHER_PID = "D9D_LAUNCHER_PID"
"""Environment variable that tells the started processes who started them."""

_LATER_DEGREES = (
    "pipeline_parallel",
    "context_parallel_replicate",
    "context_parallel_shard",
    "tensor_parallel",
    "expert_parallel",
)
"""Degrees that the engine knows and this strategy does not drive yet."""

_CONTEXTS: weakref.WeakValueDictionary[tuple[DeviceMeshParameters, torch.device], DistributedContext] = (
    weakref.WeakValueDictionary()
)
"""Contexts that strategies and modules of this process use, so that a mesh has its groups once."""

_ACTIVE: weakref.WeakValueDictionary[str, DistributedContext] = weakref.WeakValueDictionary()
"""Under "job" the context of the Trainer that ran last, for callables that must not hold groups themselves."""


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, which runs the script again for each further process, with two differences.

    The processes end when the one that started them is gone. And the thread count is left alone:
    Lightning sets ``OMP_NUM_THREADS`` to all cores of the machine divided by the processes of this job, as if nothing
    else ran there.
    """

    @override
    def launch(self, function: Callable[..., T], *args: object, trainer: Trainer | None = None, **kwargs: object) -> T:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if self.cluster_environment.creates_processes_externally:
            # Who sets LOCAL_RANK by hand may well leave the process alone afterwards.
            launcher = os.environ.get(_LAUNCHER_PID)
            with contextlib.nullcontext() if launcher is None else ends_with_parent(int(launcher)):
                return function(*args, **kwargs)
        os.environ[_LAUNCHER_PID] = str(os.getpid())
        self._call_children_scripts()
        _launch_process_observer(self.procs)
        return function(*args, **kwargs)


def check_degrees(params: DeviceMeshParameters) -> None:
    """Refuse parallelism that this release of the strategy does not drive.

    Raises:
        NotImplementedError: With all degrees in question.
    """
    degrees = params.model_dump()
    refused = [f"{name} ({degrees[name]})" for name in _LATER_DEGREES if degrees[name] > 1]
    if refused:
        raise NotImplementedError(
            f"D9DStrategy does not support {', '.join(refused)} yet: it comes with a later release. "
            f"Set it to 1, and use data_parallel_replicate and data_parallel_shard."
        )


def check_processes(
    params: DeviceMeshParameters, num_devices: int, num_nodes: int, environment: ClusterEnvironment
) -> None:
    """Refuse a Trainer whose number of processes fits neither the mesh nor the launcher. Needs no process group.

    Raises:
        ValueError: With the numbers and how to mend them.
    """
    num_processes = num_devices * num_nodes
    if environment.creates_processes_externally and not isinstance(environment, LightningEnvironment):
        launched = environment.world_size()
        if launched != num_processes:
            raise ValueError(
                f"{type(environment).__name__} says that {launched} processes were started, but "
                f"Trainer(devices={num_devices}, num_nodes={num_nodes}) asks for {num_processes}. "
                f"Set devices to the number of processes per node ({launched} / num_nodes), "
                f"or start {num_processes} processes (torchrun --nproc-per-node {num_devices})."
            )
    if params.world_size != num_processes:
        degrees = " x ".join(f"{name} {degree}" for name, degree in params.model_dump().items() if degree > 1)
        chosen = "data_parallel_replicate" if params.has_data_parallel_replicate else "data_parallel_shard"
        example = {chosen: num_processes} if num_processes > 1 else {}
        raise ValueError(
            f"The mesh needs {params.world_size} processes ({degrees or 'all degrees are 1'}), but "
            f"Trainer(devices={num_devices}, num_nodes={num_nodes}) runs {num_processes}. "
            f"Set devices={params.world_size // num_nodes}, or a mesh of {num_processes}, e.g. mesh={example}."
        )


def build_launcher(environment: ClusterEnvironment, num_devices: int, num_nodes: int) -> _Launcher | None:
    """Return what starts the other processes, or None where they exist already or are not needed.

    Raises:
        NotImplementedError: In a notebook, which cannot be run again as a script.
    """
    if num_devices * num_nodes == 1 or (
        environment.creates_processes_externally and not isinstance(environment, LightningEnvironment)
    ):
        return None
    if _IS_INTERACTIVE:
        raise NotImplementedError(
            f"D9DStrategy cannot start {num_devices} processes from a notebook yet: it comes with a later release. "
            f"Write the job to a script, or set devices=1."
        )
    return ScriptLauncher(environment, num_devices, num_nodes)


def join_job(
    params: DeviceMeshParameters, environment: ClusterEnvironment, num_devices: int, device: torch.device
) -> DistributedContext:
    """Return the context of this process, joining the job on the first call. All ranks must call it.

    A default process group that exists already is used. Several Trainers of one process that ask for the same mesh
    share its groups, so that a module which one of them has distributed can be used by the next.
    """
    known = _CONTEXTS.get((params, device))
    if known is not None and known.groups[0] is dist.group.WORLD:
        _ACTIVE["job"] = known
        return known
    os.environ.update(
        RANK=str(environment.global_rank()),
        WORLD_SIZE=str(environment.world_size()),
        LOCAL_RANK=str(environment.local_rank()),
        LOCAL_WORLD_SIZE=str(num_devices),
        MASTER_ADDR=environment.main_address,
        MASTER_PORT=str(environment.main_port),
    )
    context = DistributedContext(params, logging.INFO, device=device)
    _CONTEXTS[params, device] = context
    _ACTIVE["job"] = context
    return context


def active_data_group() -> dist.ProcessGroup | None:
    """Return the data-parallel group of the Trainer that ran last in this process; None if it ran on one rank."""
    context = _ACTIVE.get("job")
    return None if context is None else context.data_group


def leave_job() -> None:
    """Note that a Trainer without process groups runs now."""
    _ACTIVE.pop("job", None)
