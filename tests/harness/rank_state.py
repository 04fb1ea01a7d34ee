"""Process-wide state that a test may change: set before a test, restored after it."""

import gc
import os
import random
import socket
import sys
import warnings
from collections.abc import Generator, Mapping
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


def _forget_meshes() -> None:
    # DTensor caches results by mesh, and meshes of equal shape and ranks are equal: the next test would get specs
    # that hold this test's mesh, whose groups are gone. Recheck when torch > 2.13.
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    dtensor_random._rng_tracker = None
    # Groups die, with their threads and sockets, only when the cycles that hold them are found.
    gc.collect()
