"""Which processes a job runs on: how they start, and how they find each other."""
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
from lightning.fabric.strategies.launchers.subprocess_script import _launch_process_observer
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from typing_extensions import override

from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.core.parent_watch import ends_with_parent
from d9d_lightning.jobs.process_launcher import HandBack, ProcessLauncher
from d9d_lightning.options.config_check import LauncherName, starts_elsewhere

T = TypeVar("T")

_LAUNCHER_PID = "D9D_LAUNCHER_PID"
"""Environment variable that tells the started processes who started them."""

_CONTEXTS: dict[tuple[DeviceMeshParameters, torch.device], DistributedContext] = {}
"""Contexts of this process, so that a mesh has its groups once. They stay as long as the default group: ranks that free one
when they happen to collect garbage would not agree on whether the next Trainer needs new groups."""

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


def is_started_by_script() -> bool:
    """Tell whether another process of the job has started this one by running the script again."""
    launcher = os.environ.get(_LAUNCHER_PID)
    return launcher is not None and int(launcher) != os.getpid()


def build_launcher(
    strategy: ParallelStrategy,
    name: LauncherName | None,
    num_devices: int,
    num_nodes: int,
    hand_back: HandBack,
) -> _Launcher | None:
    """Return what starts the other processes, or None where they exist already or are not needed.

    Args:
        strategy: Knows who starts processes otherwise.
        name: As the user has said it. None: "fork" in a notebook, which cannot be run again as a script, and "script".
        num_devices: Number of processes on each machine.
        num_nodes: Number of machines.
        hand_back: How trained weights come back from children of this process.
    """
    environment = strategy.cluster_environment
    if environment is None or num_devices * num_nodes == 1 or starts_elsewhere(environment):
        return None
    name = name or ("fork" if _IS_INTERACTIVE else "script")
    if name == "script":
        return ScriptLauncher(environment, num_devices, num_nodes)
    return ProcessLauncher(strategy, name, num_devices, hand_back)


def tell_ranks(environment: ClusterEnvironment, num_devices: int, num_nodes: int) -> None:
    """Tell a cluster environment which rank this process is, and how many there are."""
    environment.set_global_rank(environment.node_rank() * num_devices + environment.local_rank())
    environment.set_world_size(num_devices * num_nodes)


def join_job(
    params: DeviceMeshParameters,
    environment: ClusterEnvironment,
    num_devices: int,
    device: torch.device,
    timeout_s: float | None = None,
) -> DistributedContext:
    """Return the context of this process, joining the job on the first call. All ranks must call it.

    A default process group that exists already is used. Several Trainers of one process that ask for the same mesh
    share its groups, so that a module which one of them has distributed can be used by the next.

    Args:
        params: Parallelism degrees.
        environment: Knows the ranks.
        num_devices: Number of processes on each machine.
        device: Device of this rank.
        timeout_s: Time limit of collectives from now on, in seconds; None leaves it.
    """
    forget_contexts()
    context = _CONTEXTS.get((params, device))
    if context is None:
        context = _CONTEXTS[params, device] = _build_context(params, environment, num_devices, device)
    _ACTIVE["job"] = context
    if timeout_s is not None:
        context.set_timeout(timeout_s)
    return context


def _build_context(
    params: DeviceMeshParameters, environment: ClusterEnvironment, num_devices: int, device: torch.device
) -> DistributedContext:
    os.environ.update(
        RANK=str(environment.global_rank()),
        WORLD_SIZE=str(environment.world_size()),
        LOCAL_RANK=str(environment.local_rank()),
        LOCAL_WORLD_SIZE=str(num_devices),
        MASTER_ADDR=environment.main_address,
        MASTER_PORT=str(environment.main_port),
    )
    return DistributedContext(params, logging.INFO, device=device)


def forget_contexts() -> None:
    """Let go of the contexts of a default process group that was destroyed."""
    for key, context in list(_CONTEXTS.items()):
        if context.groups[0] is not dist.group.WORLD:
            del _CONTEXTS[key]


def active_context() -> DistributedContext | None:
    """Return the context of the Trainer that ran last in this process; None if it ran on one rank."""
    return _ACTIVE.get("job")


def leave_job() -> None:
    """Note that a Trainer without process groups runs now."""
    _ACTIVE.pop("job", None)
