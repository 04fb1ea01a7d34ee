"""Converts model states offline, from one layout to another, tensor by tensor and in parallel processes.

[Note: workers of a conversion]
Each worker takes its share of the mapper's groups, reads what they need, and is one rank of a gloo group over which the
distributed writer agrees on names and on the index. It tells its parent by a pipe how far it is, what went wrong, or that
it is through; the end of the pipe without such a word means that it has died. The parent then ends the others, which may
wait for it. Only plain values go to a worker: it builds the mapper from its reference itself.
"""

import contextlib
import dataclasses
import functools
import math
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from tqdm import tqdm

from d9d.core.parent_watch import ends_with_parent
from d9d.model_state.inspection import counted, dry_run, format_size
from d9d.model_state.io.export_directory import prepare_directory
from d9d.model_state.io.progress import progress_bar
from d9d.model_state.io.reader import read_model_state
from d9d.model_state.io.source import ModelStateSource, open_model_state
from d9d.model_state.io.writer import write_model_state_distributed, write_model_state_local
from d9d.model_state.mapper.adapters import identity_mapper_from_mapper_outputs, identity_mapper_from_names
from d9d.model_state.mapper.base import ModelStateMapper
from d9d.model_state.mapper.compose import ModelStateMapperShard
from d9d.model_state.mapper.names import listed
from d9d.model_state.mapper_reference import describe_with_place, load_mapper

__all__ = ["DTYPES", "Conversion", "ConversionResult", "convert_model_state"]

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""What the command line calls the dtypes that tensors can be converted to."""

_GRACE_S = 2.0
"""After the first failure: for other workers to say what they know of it. After success: to end by themselves."""

_GROUP_TIMEOUT = timedelta(hours=24)
"""Workers wait for each other until all have written their shares, however long. The parent notices when one dies."""

_GLOO_DRAIN_S = 0.05
"""For gloo's threads to end before the interpreter does, see `d9d.core.launch`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What to convert, and how. Plain values, which go to worker processes."""

    src_dir: Path
    """Model state to read."""
    dest_dir: Path
    """Folder to write, which is made."""
    mapper: str | None = None
    """``pkg.module:function``, see `load_mapper`; without, every tensor passes under its own name."""
    shard_size_gb: float = 4.0
    """Size limit of a file."""
    dtype: torch.dtype | None = None
    """For all floating point tensors; without, each keeps its own."""
    num_workers: int = 1
    """Processes to convert with. More than the mapper has groups are not started."""
    manifest: bool = False
    """Whether to write the sha256 sums of the files beside them."""
    overwrite: bool = False
    """Whether a model state that is already in ``dest_dir`` may go."""
    cache_root: Path | None = None
    """See `open_model_state`."""
    allow_bin: bool = False
    """See `open_model_state`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConversionResult:
    """What a conversion has written, and what it has left."""

    dest_dir: Path
    num_tensors: int
    num_files: int
    num_bytes: int
    unread: tuple[str, ...]
    """Tensors of the source that the mapper does not ask for, by name."""

    def __str__(self) -> str:
        size, files = format_size(self.num_bytes), counted(self.num_files, "file")
        written = f"{self.dest_dir}: {counted(self.num_tensors, 'tensor')}, {size}, in {files}"
        unread = f"\nnot read from the source: {counted(len(self.unread), 'tensor')}: {listed(self.unread)}"
        return written + (unread if self.unread else "")


def convert_model_state(conversion: Conversion, *, show_progress: bool = True) -> ConversionResult:
    """Write a model state in another layout, dtype or number of files. Memory holds one group of each worker.

    Blocks until all is written. The mapper is tried without data first, so most mistakes are found before anything is
    written. Of a conversion that fails no complete model state is left. Workers are processes that import the main
    module, so a script that calls this keeps its own work under ``if __name__ == "__main__"``.

    Args:
        conversion: What to do.
        show_progress: Whether to show a bar on stderr, if that is a terminal.

    Raises:
        ValueError: If the source is broken, the mapper does not fit it (with all reasons), or the destination is taken.
        OSError: If the source cannot be read.
        RuntimeError: If the conversion failed on its way, with the reason.
    """
    with _open_source(conversion, verify=True) as source:
        tensors = dict(source.tensors)
    mapper = _build_mapper(conversion, sorted(tensors))
    tried = dry_run(mapper, tensors)
    if problems := [*_problems(conversion), *tried.problems]:
        raise ValueError(problems[0] if len(problems) == 1 else "".join(f"\n  {problem}" for problem in problems))
    num_workers = min(conversion.num_workers, max(1, len(mapper.state_dependency_groups())))
    bar = progress_bar(len(tried.outputs), "tensor", "converting", show_progress)
    with bar, _tidy_after_failure(conversion.dest_dir):
        if num_workers > 1:
            _run_workers(dataclasses.replace(conversion, num_workers=num_workers), bar.update)
        else:
            _run_here(conversion, mapper, bar.update)
    with open_model_state(conversion.dest_dir, verify=False) as written:
        infos = list(written.tensors.values())
    return ConversionResult(
        dest_dir=conversion.dest_dir,
        num_tensors=len(infos),
        num_files=len({info.file for info in infos}),
        num_bytes=sum(info.num_bytes for info in infos),
        unread=tried.unread,
    )


def _open_source(conversion: Conversion, *, verify: bool) -> ModelStateSource:
    cache_root, allow_bin = conversion.cache_root, conversion.allow_bin
    return open_model_state(conversion.src_dir, cache_root=cache_root, verify=verify, allow_bin=allow_bin)


def _problems(conversion: Conversion) -> Iterator[str]:
    if conversion.num_workers < 1:
        yield f"the number of workers ({conversion.num_workers}) must be at least 1."
    if not 0 < conversion.shard_size_gb < math.inf:
        yield f"the shard size ({conversion.shard_size_gb} GB) must be above 0."
    src, dest = conversion.src_dir.resolve(), conversion.dest_dir.resolve()
    if dest == (src.parent if src.is_file() else src):
        yield f"{conversion.dest_dir} is the source itself, and a conversion cannot replace what it reads."
    elif dest.exists() and not dest.is_dir():
        yield f"{conversion.dest_dir} is not a folder."
    elif not conversion.overwrite and (taken := sorted(path.name for path in dest.glob("[!.]*.safetensors*"))):
        yield f"{conversion.dest_dir} holds a model state ({listed(taken)}): name another folder, or overwrite it."


def _build_mapper(conversion: Conversion, names: Sequence[str]) -> ModelStateMapper:
    return load_mapper(conversion.mapper, names) if conversion.mapper else identity_mapper_from_names(names)


@contextlib.contextmanager
def _tidy_after_failure(dest_dir: Path) -> Generator[None]:
    """Remove unfinished files, which a worker that was killed leaves, and a conversion that was interrupted."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # the failure itself says more
            if dest_dir.is_dir():
                prepare_directory(dest_dir).release()
        raise


def _write(
    conversion: Conversion,
    mapper: ModelStateMapper,
    states: Iterable[tuple[str, torch.Tensor]],
    group: dist.ProcessGroup | None,
) -> None:
    """Write what a mapper has made. All ranks of the group must call it, each with its own share."""
    outputs = identity_mapper_from_mapper_outputs(mapper)
    write = (
        write_model_state_local
        if group is None
        else functools.partial(write_model_state_distributed, process_group=group)
    )
    write(
        conversion.dest_dir,
        outputs,
        states,
        shard_size_gb=conversion.shard_size_gb,
        show_progress=False,
        dtype=conversion.dtype,
        manifest=conversion.manifest,
    )


def _read(
    conversion: Conversion, mapper: ModelStateMapper, advance: Callable[[int], object]
) -> Iterator[tuple[str, torch.Tensor]]:
    states = read_model_state(
        conversion.src_dir,
        mapper,
        "cpu",
        show_progress=False,
        cache_root=conversion.cache_root,
        verify=False,  # it has been, once for all workers
        allow_bin=conversion.allow_bin,
    )
    for state in states:
        yield state
        advance(1)


# ---- In this process -------------------------------------------------------------------------------------------------


def _run_here(conversion: Conversion, mapper: ModelStateMapper, advance: Callable[[int], object]) -> None:
    try:
        _write(conversion, mapper, _read(conversion, mapper, advance), None)
    except Exception as error:
        raise _incomplete(conversion, _describe(error)) from error


def _describe(error: BaseException) -> str:
    """Return the message of an error that is meant for users; of one that is not, its type and place too."""
    return str(error) if isinstance(error, (ValueError, OSError)) else describe_with_place(error)


def _incomplete(conversion: Conversion, reason: str) -> RuntimeError:
    return RuntimeError(f"the conversion to {conversion.dest_dir} was not completed: {reason}")


# ---- In workers: see [Note: workers of a conversion] -----------------------------------------------------------------


@final
class _Worker:
    """A process that converts one share, as its parent sees it."""

    def __init__(self, context: SpawnContext, conversion: Conversion, rank: int, store: Path) -> None:
        """Start the process without waiting for it.

        Args:
            context: Where to start it.
            conversion: What all workers do.
            rank: Which share is this one's.
            store: File by which the workers find each other.
        """
        self._rank = rank
        self.reports, worker_end = context.Pipe(duplex=False)
        arguments = (conversion, rank, store, os.getpid(), worker_end)
        self._process = context.Process(target=_work, args=arguments, daemon=True, name=f"convert-{rank}")
        self._process.start()
        # Only the worker may hold its end, or its death would not show as the end of the pipe.
        worker_end.close()

    def describe_death(self) -> str:
        """Say how the process died, which has closed its pipe."""
        self._process.join(_GRACE_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"worker {self._rank} was killed by {signal.Signals(-code).name} (is there enough memory?)"
        return f"worker {self._rank} died with exit code {code}"

    def end(self, patience_s: float) -> None:
        """Wait for the process some time, then kill it."""
        self._process.join(patience_s)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.reports.close()


def _run_workers(conversion: Conversion, advance: Callable[[int], object]) -> None:
    context = multiprocessing.get_context("spawn")
    workers: list[_Worker] = []
    failures: list[str] | None = None
    with tempfile.TemporaryDirectory(prefix="d9d-convert-") as folder:
        try:
            for rank in range(conversion.num_workers):
                # One by one: should a start fail, those before must be ended.
                workers.append(_Worker(context, conversion, rank, Path(folder) / "store"))  # noqa: PERF401
            failures = _follow(workers, advance)
        finally:
            for worker in workers:
                worker.end(_GRACE_S if failures == [] else 0.0)
    if failures:
        raise _incomplete(conversion, failures[0])


def _follow(workers: Sequence[_Worker], advance: Callable[[int], object]) -> list[str]:
    """Return when all workers are through, or shortly after one has failed.

    Returns:
        What went wrong, the cause first: a death, before what the other workers have noticed of it.
    """
    running = {worker.reports: worker for worker in workers}
    deaths: list[str] = []
    failures: list[str] = []
    deadline = math.inf
    while running and time.monotonic() < deadline:
        patience_s = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        ready = wait(list(running), patience_s)
        for reports, worker in list(running.items()):
            if reports not in ready:
                continue
            try:
                report = reports.recv()
            except EOFError:
                del running[reports]
                deaths.append(worker.describe_death())
                continue
            if isinstance(report, int):
                advance(report)
                continue
            del running[reports]
            if report is not None:
                failures.append(report)
        if (deaths or failures) and deadline == math.inf:
            deadline = time.monotonic() + _GRACE_S
    return deaths + failures


def _work(conversion: Conversion, rank: int, store: Path, parent_pid: int, reports: Connection) -> None:
    """Convert one share; the whole life of a worker. Sends numbers of tensors, and last the failure, or None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends us
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which a worker that is killed would leave
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // conversion.num_workers))
    try:
        with ends_with_parent(parent_pid):
            with _open_source(conversion, verify=False) as source:
                mapper = _build_mapper(conversion, sorted(source.tensors))
            share = ModelStateMapperShard(mapper, conversion.num_workers, rank)
            with _gloo_group(rank, conversion.num_workers, store):
                states = _reporting_failures(_read(conversion, share, reports.send), reports)
                _write(conversion, share, states, dist.group.WORLD)
    except Exception as error:
        reports.send(_describe(error))
        raise SystemExit(1) from error
    reports.send(None)


def _reporting_failures(
    states: Iterable[tuple[str, torch.Tensor]], reports: Connection
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tell the parent of a failure at once. The writer raises it when all others have written their shares, too."""
    try:
        yield from states
    except Exception as error:
        reports.send(_describe(error))
        raise


@contextlib.contextmanager
def _gloo_group(rank: int, num_ranks: int, store: Path) -> Generator[None]:
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if loopback:  # without it gloo resolves the host name, which is slow or fails on machines without a network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), num_ranks),  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=num_ranks,
        timeout=_GROUP_TIMEOUT,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
        time.sleep(_GLOO_DRAIN_S)
