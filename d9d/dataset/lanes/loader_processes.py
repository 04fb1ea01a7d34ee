"""Loader processes: how they are set, how they begin, and what is said when one fails."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from d9d.dataset.lanes.worker_transfer import WorkerTransfer, message_bytes, tried

__all__ = ["ItemLoader", "LoaderOptions", "OwnProcessGroup", "loader_failure"]

_PREFETCH_FACTOR = 2
"""PyTorch's default."""
_WATCH_PERIOD_S = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """Sets how PyTorch's loader runs. None of it changes which samples come, or in which order.

    Raises:
        ValueError: On creation; names all problems.

    Attributes:
        num_workers: Loader processes per rank; 0 loads where the stream is read.
        persistent_workers: Keep loader processes when the stream starts anew.
        pin_memory: Copy microbatches to page-locked memory, in a thread of the loader.
        prefetch_factor: Microbatches, or the documents of as many, that each loader process loads ahead; None for PyTorch's default.
        timeout_s: Seconds to wait for a microbatch of a loader process; 0 for ever.
        start_method: How loader processes start, "fork", "spawn" or "forkserver"; None for Python's default.
    """

    num_workers: int = 0
    persistent_workers: bool = False
    pin_memory: bool = False
    prefetch_factor: int | None = None
    timeout_s: float = 0.0
    start_method: str | None = None

    def __post_init__(self) -> None:
        problems = [
            f"{name} ({value}) must not be negative."
            for name, value in (("num_workers", self.num_workers), ("timeout_s", self.timeout_s))
            if value < 0
        ]
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            problems.append(f"prefetch_factor ({self.prefetch_factor}) must be at least 1.")
        if self.num_workers == 0:
            for_workers: tuple[tuple[str, object, bool], ...] = (
                ("persistent_workers", self.persistent_workers, self.persistent_workers),
                ("prefetch_factor", self.prefetch_factor, self.prefetch_factor is not None),
                ("timeout_s", self.timeout_s, self.timeout_s > 0),
                ("start_method", self.start_method, self.start_method is not None),
            )
            problems.extend(
                f"{name} ({value}) needs num_workers >= 1." for name, value, is_set in for_workers if is_set
            )
        if problems:
            raise ValueError(" ".join(problems))


@dataclasses.dataclass(frozen=True)
class OwnProcessGroup:
    """Puts a loader process of PyTorch into a process group of its own: the ``worker_init_fn`` of a loader.

    Launchers that tell a job to end signal the process group of each rank, as torchrun does (torch 2.13). The rank only notes
    that, and saves after its step; a loader process would end at once, and the rank then fails for want of data. Out of reach
    of such signals, loader processes end with their rank.

    [Note: loader processes end at once]
    A loader process that was forked holds the sockets and locks of its rank, too. When the rank is killed, nobody notices until
    the loader processes have ended, and PyTorch's look for their parent every 5 s only. So a thread looks more often.

    Attributes:
        then: The ``worker_init_fn`` of the user, called after that.
    """

    then: Callable[[int], None] | None = None

    def __call__(self, worker_id: int) -> None:
        """Begin a loader process, in it."""
        os.setpgid(0, 0)
        threading.Thread(target=_end_with, args=(os.getppid(),), name="d9d-rank-watch", daemon=True).start()
        if self.then is not None:
            self.then(worker_id)


def _end_with(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_WATCH_PERIOD_S)
    # Not sys.exit: it would end this thread only.
    os._exit(1)


# `Any`, here and below: items are of any type.
class ItemLoader:
    """Passes on the items of a dataset as they are, from loader processes of PyTorch.

    Args:
        items: Loads an item for what the sampler yields. It travels to loader processes.
        sampler: Yields what to load, in this process; asked anew by each `iter()` of the loader.
        options: Loader processes and how they load.
        seeds: Draws the seeds of loader processes, so that the global generator is left alone.
        is_copied: Whether items leave shared memory when they arrive, see `WorkerTransfer`.
    """

    def __init__(
        self,
        items: Dataset[Any],
        sampler: Sampler[Any],
        options: LoaderOptions,
        seeds: torch.Generator,
        *,
        is_copied: bool = False,
    ) -> None:
        self.items = items
        max_bytes = message_bytes(options.num_workers * (options.prefetch_factor or _PREFETCH_FACTOR))
        transfer = WorkerTransfer(max_bytes=max_bytes, is_copied=is_copied)
        self._unpack: Callable[[Any], Any] = _as_it_is
        collate: Callable[[Any], Any] = _as_it_is
        if options.num_workers > 0 and options.pin_memory:
            # The thread that puts tensors into page-locked memory must find them.
            collate = tried
        elif options.num_workers > 0:
            collate, self._unpack = transfer.pack, transfer.unpack
        self._loader = DataLoader(
            items,
            sampler=sampler,
            batch_size=None,
            collate_fn=collate,
            num_workers=options.num_workers,
            persistent_workers=options.persistent_workers,
            pin_memory=options.pin_memory,
            prefetch_factor=options.prefetch_factor,
            timeout=options.timeout_s,
            worker_init_fn=OwnProcessGroup(),
            multiprocessing_context=options.start_method,
            generator=seeds,
        )

    def __iter__(self) -> Iterator[Any]:
        return map(self._unpack, self._loader)


# A function, since a lambda cannot travel to processes that are spawned.
def _as_it_is(item: Any) -> Any:  # noqa: ANN401
    return item


def loader_failure(where: str, waited_for: str, error: RuntimeError) -> RuntimeError:
    """Return what to raise instead of an error of PyTorch's loader itself.

    Args:
        where: Which step, lane or rank the loader works for.
        waited_for: Names samples.
        error: What the loader said.
    """
    return RuntimeError(
        f"the data loader failed {where}, while it waited for {waited_for}, outside of dataset and collate function: a loader "
        f"process died, such as for lack of memory, or took longer than its timeout. It says: {error}"
    )
