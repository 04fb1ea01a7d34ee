"""Process-wide state that a test may change: set before a test, restored after it."""

import functools
import gc
import os
import random
import socket
import sys
import time
import warnings
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor._random as dtensor_random
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

SEED = 0

_LOOPBACK_NAMES = ("lo", "lo0")

_MAX_LEFT_LOOPS = 32
"""Event loops of gloo groups that tests may leave in a rank. Each wakes up a hundred times a second: those of some
hundred tests keep two cores busy."""
_MAX_IDLE_LOAD = 0.8
"""Threads that may want to run in a rank without a task, on average over a wait."""
_MIN_IDLE_S = 0.05
_TASKS = Path("/proc/self/task")


def torchrun_environment(rank: int, world_size: int) -> dict[str, str]:
    """Build the variables that torchrun would set for a rank of one node."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        # A dummy: ranks meet through a file. Whoever connects to it is refused at once.
        "MASTER_PORT": "1",
    }
    # Without it gloo resolves the host name, which is slow or fails on machines without a network.
    loopback = [name for _, name in socket.if_nameindex() if name in _LOOPBACK_NAMES]
    if loopback:
        variables["GLOO_SOCKET_IFNAME"] = loopback[0]
    return variables


@contextmanager
def environment(variables: Mapping[str, str]) -> Generator[None]:
    """Replace the whole environment."""
    saved = dict(os.environ)
    try:
        _set_environment(variables)
        yield
    finally:
        _set_environment(saved)


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


@contextmanager
def redirected_output(path: Path) -> Generator[None]:
    """Send stdout and stderr to a file, at the level of file descriptors: C++ logs and child processes included."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(fd, os.dup(fd)) for fd in (1, 2)]
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        for fd, _ in saved:
            os.dup2(target, fd)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, copy in saved:
            os.dup2(copy, fd)
            os.close(copy)
        os.close(target)


@contextmanager
def seeded_globals() -> Generator[None]:
    """Seed torch, numpy and random; restore dtype, device, grad mode, determinism, filters and directory after."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    dtype, device, grad = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    num_threads = torch.get_num_threads()
    directory = Path.cwd()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        os.chdir(directory)
        torch.set_default_dtype(dtype)
        # None, not the device: setting one installs a mode that every torch function call then goes through.
        if torch.get_default_device() != device:
            torch.set_default_device(None)
        torch.set_grad_enabled(grad)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(num_threads)


@contextmanager
def process_group(rank: int, world_size: int, store_path: str, timeout_s: float) -> Generator[None]:
    """Hold a default gloo group. A collective."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store_path, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        if dist.is_initialized():  # the test may have destroyed it
            dist.destroy_process_group()
        _forget_meshes()


class WearGauge:
    """Tells whether what tests have left in this process costs more than a new process.

    Used by one thread: `start_waiting`, then `stop_waiting`, then `is_worn`, for each task. Measures nothing where the
    system has no /proc.
    """

    def __init__(self, own_threads: Collection[int]) -> None:
        """Start unworn.

        Args:
            own_threads: Native ids of the threads that take the tasks: they may be late on a busy machine.
        """
        self._own_threads = {str(thread) for thread in own_threads}
        self._waiting_since = (time.monotonic(), self._runnable_s())
        self._idle_load = 0.0

    def start_waiting(self) -> None:
        """Measure what runs from now on."""
        self._waiting_since = (time.monotonic(), self._runnable_s())

    def stop_waiting(self) -> None:
        """Take a wait into account that was long enough to tell."""
        start_s, before_s = self._waiting_since
        waited_s = time.monotonic() - start_s
        if waited_s >= _MIN_IDLE_S:
            self._idle_load = (self._runnable_s() - before_s) / waited_s

    @property
    def is_worn(self) -> bool:
        """Whether a thread has run all the time that the process waited, or groups that nobody uses have many loops."""
        return self._idle_load > _MAX_IDLE_LOAD or count_gloo_loops() > _MAX_LEFT_LOOPS

    def _runnable_s(self) -> float:
        # Time on a core and time spent waiting for one: that sum does not depend on what else the machine does.
        states = [_read(path / "schedstat") for path in _TASKS.glob("*") if path.name not in self._own_threads]
        return sum(int(number) for state in states for number in state.split()[:2]) / 1e9


def count_gloo_loops() -> int:
    """Count the event loops of gloo groups in this process; 0 where the system does not name threads in /proc."""
    return sum(_read(path).strip() == "gloo_tcp_loop" for path in _TASKS.glob("*/comm"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the thread has ended meanwhile
        return ""


def _forget_meshes() -> None:
    # DTensor caches results by mesh, and meshes of equal shape and ranks are equal: the next test would get specs
    # that hold this test's mesh, whose groups are gone. Recheck when torch > 2.13.
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    for cache in _caches_of_torch():
        cache.cache_clear()
    dtensor_random._rng_tracker = None
    launch = sys.modules.get("d9d_lightning.jobs.launch")
    if launch is not None:
        launch.forget_contexts()
    # Groups die, with their threads and sockets, only when the cycles that hold them are found.
    gc.collect()


def _caches_of_torch() -> Iterator["functools._lru_cache_wrapper[object]"]:
    """Yield what `functools` caches for DTensor, some of it by mesh."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("torch.distributed.tensor"):
            continue
        classes = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name]
        for value in [value for owner in (module, *classes) for value in vars(owner).values()]:
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if isinstance(function, functools._lru_cache_wrapper):
                yield function
