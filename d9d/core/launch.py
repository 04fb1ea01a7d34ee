"""What the launcher says about this process: the one place that reads its environment variables."""

import atexit
import dataclasses
import os
import time
from datetime import timedelta
from typing import Self

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed re-exports them silently (torch 2.13)
from torch.distributed.rendezvous import rendezvous

_INIT_TIMEOUT = timedelta(seconds=1800)
"""Limit for joining; the loop replaces it by its own init and step timeouts once the context exists."""

_ARRIVALS = "d9d/num_arrivals"
_POLL_S = 0.01

_GLOO_DRAIN_S = 0.05
"""Time for gloo's threads to free a few tensors; they need some microseconds of it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """Ranks of this process as torchrun and compatible launchers set them; a plain process is rank 0 of 1."""

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    num_nodes: int
    master_addr: str

    @classmethod
    def read(cls) -> Self:
        """Read the environment, or the default process group where one exists.

        Raises:
            ValueError: With all malformed variables.
        """
        problems: list[str] = []
        world_size = _integer("WORLD_SIZE", 1, 1, problems)
        rank = _integer("RANK", 0, 0, problems)
        local_rank = _integer("LOCAL_RANK", rank, 0, problems)
        local_world_size = _integer("LOCAL_WORLD_SIZE", world_size, 1, problems)
        if not problems and rank >= world_size:
            problems.append(f"RANK={rank} must be less than WORLD_SIZE={world_size}")
        if world_size > 1 and "RANK" not in os.environ and not dist.is_initialized():
            problems.append(f"RANK is not set, but WORLD_SIZE={world_size}: all processes would be rank 0")
        if problems:
            raise ValueError(f"Malformed launch environment: {'; '.join(problems)}.")
        if dist.is_initialized():
            world_size, rank = dist.get_world_size(), dist.get_rank()
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            node_rank=rank // local_world_size,
            num_nodes=max(1, world_size // local_world_size),
            master_addr=os.environ.get("MASTER_ADDR", "localhost"),
        )

    def ensure_process_group(self, backend: str) -> None:
        """Create the default process group, unless its owner has done so. Blocks until all ranks are here.

        Args:
            backend: Backend string of ``init_process_group``.
        """
        if dist.is_initialized():
            return
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"{' and '.join(missing)} not set, so the {self.world_size} processes cannot find each other. "
                f"Start the job with torchrun --nproc-per-node {self.world_size}."
            )
        store, rank, world_size = next(rendezvous("env://", timeout=_INIT_TIMEOUT))
        own = _store_of_this_start(store, rank, world_size)
        dist.init_process_group(backend, timeout=_INIT_TIMEOUT, store=own, rank=rank, world_size=world_size)
        atexit.register(_leave_process_group)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartEnvironment:
    """Which attempt at the job this process belongs to, where torchrun starts it again when it fails."""

    run_id: str
    """Of the job; "none" where nobody has named it."""
    attempt: int
    """How often it was restarted by the agent of this node. Each counts the failures of its own processes, and may restart
    them because of others, so nodes have different counts."""
    max_restarts: int
    """How often it may be; 0 also where nobody restarts it."""

    @classmethod
    def read(cls) -> Self:
        """Read the environment.

        Raises:
            ValueError: With all malformed variables.
        """
        problems: list[str] = []
        attempt = _integer("TORCHELASTIC_RESTART_COUNT", 0, 0, problems)
        max_restarts = _integer("TORCHELASTIC_MAX_RESTARTS", 0, 0, problems)
        if problems:
            raise ValueError(f"Malformed launch environment: {'; '.join(problems)}.")
        return cls(run_id=os.environ.get("TORCHELASTIC_RUN_ID", "none"), attempt=attempt, max_restarts=max_restarts)


def _store_of_this_start(store: Store, rank: int, world_size: int) -> Store:
    """Return a store that only the processes of this start of the job know. All ranks must call it; blocks until they are here.

    [Note: starts of a job]
    torchrun keeps its store when it restarts the processes, with the addresses of those that are gone (torch 2.13), and
    nothing that it tells them names the start: restarts are counted on each node, see `RestartEnvironment`. So each process
    draws a number that no other one has, and that of rank 0 is the name. Rank 0 answers all numbers, those of
    processes that are gone as well, until all ranks of this start have heard it. When they exist, no process of an earlier
    one does: torchrun has ended them before.
    """
    arrival = store.add(_ARRIVALS, 1)
    if rank != 0:
        start = store.get(_answer_to(arrival)).decode()
        store.add(_num_heard(start), 1)
        return PrefixStore(f"d9d/start_{start}", store)
    start, num_answered, end_s = str(arrival), 0, time.monotonic() + _INIT_TIMEOUT.total_seconds()
    while (num_heard := store.add(_num_heard(start), 0)) < world_size - 1:
        if time.monotonic() > end_s:
            address = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
            raise RuntimeError(
                f"only {num_heard + 1} of {world_size} processes have come to {address} within {_INIT_TIMEOUT}. See whether the "
                f"others have failed, were started with this address (MASTER_ADDR:MASTER_PORT), and reach it."
            )
        num_arrivals = store.add(_ARRIVALS, 0)
        for other in range(num_answered + 1, num_arrivals + 1):
            store.set(_answer_to(other), start)
        num_answered = num_arrivals
        time.sleep(_POLL_S)
    return PrefixStore(f"d9d/start_{start}", store)


def _answer_to(arrival: int) -> str:
    return f"d9d/start_of_arrival/{arrival}"


def _num_heard(start: str) -> str:
    return f"d9d/num_heard/{start}"


def _leave_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # Gloo's threads take the GIL to free the tensors of their last collective. A thread that still waits for it when
    # the interpreter finalizes aborts the process ("terminate called without an active exception"). The group object
    # may outlive this function, and its threads with it, so let go of the GIL until they are through. (torch 2.13)
    time.sleep(_GLOO_DRAIN_S)


def _integer(name: str, default: int, minimum: int, problems: list[str]) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or int(text) < minimum:
        problems.append(f"{name}={text!r} must be a whole number of at least {minimum}")
        return default
    return int(text)
