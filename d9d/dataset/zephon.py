"""Packs from a pipeline of Zephon (PyPI `zephon`), whose positions are one checkpoint over all ranks.

Zephon keeps the elasticity: it divides its data into lanes, and a data-parallel rank reads the same number of them each.
Here are the steps, what a resume must not change, and the end of the data. Written against zephon 0.2.0.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from d9d.core.protocol import MicrobatchPackStream
from d9d.core.types import MicrobatchPack
from d9d.dataset.sharded import refuse_changed_state

__all__ = ["ZephonPackStream", "ZephonPipeline", "pipeline_identity"]

_POSITION_KEY = "zephon"
_NUM_STEPS_KEY = "num_steps"
_PREFETCH = "PrefetchOp"
_WHOLE_FILE_BYTES = 1 << 20
_PROBE_BYTES = 1 << 12
_NUM_PROBES = 64
_DIGEST_BYTES = 16


class ZephonPipeline(Protocol):
    """Describes what is used of a ``zephon.Pipeline``."""

    def __iter__(self) -> Iterator[Any]:  # batches of samples of any type
        """Start the engine, or go on from a restored position."""
        ...

    def checkpoint(self) -> dict[str, Any]:
        """Merge the positions of all ranks."""
        ...

    def restore(self, ckpt: dict[str, Any]) -> None:
        """Go on from a position at the next `iter()`."""
        ...


class ZephonPackStream(MicrobatchPackStream):
    """Groups the batches of a pipeline into packs.

    Its state is collective: all ranks must ask for it behind the same step, and each call exchanges the positions of all
    of them. So nobody may read ahead of the step that is trained on (`state_is_collective`); Zephon itself does, and does
    not count that.

    Args:
        pipeline: Pipeline of this rank, with its options set.
        microbatches_per_pack: Batches of the pipeline that make a pack.
        to_microbatch: Makes a microbatch from what the pipeline yields.
        total_steps: Number of packs, or None to go on until the data of some rank end.
        identity: What the position depends on, compared at a resume.
        end_group: Ranks that agree on the end of the data, on CPU; None if they need not: on one rank, or with
            `total_steps`.
    """

    def __init__(
        self,
        pipeline: ZephonPipeline,
        *,
        microbatches_per_pack: int,
        to_microbatch: Callable[[Any], Any],
        total_steps: int | None,
        identity: Mapping[str, str | int],
        end_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._microbatches_per_pack = microbatches_per_pack
        self._to_microbatch = to_microbatch
        self._total_steps = total_steps
        self._identity = dict(identity)
        self._end_group = end_group
        self._num_steps = 0

    @property
    def has_rank_invariant_state(self) -> bool:
        """Tell that the state is the same on every rank: Zephon merges it."""
        return True

    @property
    def state_is_collective(self) -> bool:
        """Tell that all ranks must ask for the state together, behind the same step."""
        return True

    @property
    def total_steps(self) -> int | None:
        """Number of packs from the start of the run, if it was given."""
        return self._total_steps

    def __iter__(self) -> Iterator[MicrobatchPack[Any]]:
        batches = iter(self._pipeline)
        while self._num_steps != self._total_steps:
            pack = tuple(map(self._to_microbatch, itertools.islice(batches, self._microbatches_per_pack)))
            if not self._is_full_everywhere(len(pack) == self._microbatches_per_pack):
                if self._total_steps is not None:
                    raise RuntimeError(
                        f"the data of the Zephon pipeline ended behind {self._num_steps} of {self._total_steps} steps: lower "
                        f"total_steps, or let the work source repeat its data."
                    )
                return
            self._num_steps += 1
            yield pack

    def _is_full_everywhere(self, is_full: bool) -> bool:
        """Agree on the end: lanes of a finite source need not have equally many batches."""
        if self._end_group is None:
            return is_full
        flag = torch.tensor(int(is_full))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._end_group)
        return bool(flag)

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last pack; the same on all ranks. All ranks must call it; blocks the host.

        Positions are text: they hold integers of 128 bits, the states of generators, which msgpack has no form for.
        """
        position = json.dumps(self._pipeline.checkpoint(), separators=(",", ":"))
        return {**self._identity, _NUM_STEPS_KEY: self._num_steps, _POSITION_KEY: position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to a saved position. It takes effect at the next `iter()`. All ranks must call it.

        Raises:
            ValueError: The position would mean other samples now; names each value that differs.
        """
        refuse_changed_state("the Zephon stream", state_dict, self._identity)
        self._num_steps = int(state_dict[_NUM_STEPS_KEY])
        self._pipeline.restore(json.loads(state_dict[_POSITION_KEY]))


def pipeline_identity(pipeline: object) -> dict[str, str | int]:
    """Return what the position of a pipeline depends on, apart from where its files are.

    Zephon resumes over another seed, other operations, and shards that were added or edited (0.2.0). Files of up to 1 MiB
    count by all of their bytes, larger ones by their size and 64 blocks of 4 KiB. Of data that are not in local files, and
    of other work sources than ``StaticMixtureWorkSource``, counts of samples are known, or nothing. Operations count by
    their plain settings and the names of their functions; prefetching does not: it hands on what it gets, as it gets it.

    Reads files; call it on one rank.

    Args:
        pipeline: A ``zephon.Pipeline``.
    """
    source = vars(pipeline).get("ws")  # introspection: Zephon has no public way to ask for any of this
    details = vars(source)
    datasets = cast("Iterable[Any]", details.get("_datasets", ()))
    weights = cast("Mapping[str, float]", details.get("_weights", {}))
    knobs = cast("Mapping[str, object]", details.get("_knobs_by_name", {}))
    allocation = details.get("_alloc_config")
    chunk_size = -1 if allocation is None else int(allocation.chunk_size)
    return {
        "work_source": type(source).__qualname__,
        "seed": int(cast("int", details.get("_seed", -1))),
        "weights": json.dumps(dict(weights), sort_keys=True),
        "order": " ".join(f"{name}={knobs[name]!r}" for name in sorted(knobs)),
        "chunk_size": chunk_size,
        "operations": " | ".join(_describe_operations(vars(pipeline).get("_tail"))),  # introspection: as above
        "shards": " ".join(f"{dataset.name}={_digest_of(dataset)}" for dataset in datasets),
    }


def _describe_operations(node: Any) -> list[str]:  # noqa: ANN401  # a node of Zephon's graph
    """Return name and settings of each operation that makes samples, up to a node, the first one first."""
    described: list[str] = []
    while node is not None:
        if type(node.op).__name__ != _PREFETCH:
            settings = vars(node.op)  # introspection: operations of Zephon have no common way to tell their settings
            texts = ((name, _setting(value)) for name, value in sorted(settings.items()) if not name.startswith("_"))
            described.insert(0, " ".join([str(node.name), *(f"{name}={text}" for name, text in texts if text)]))
        node = node.inputs[0] if node.inputs else None
    return described


def _setting(value: object) -> str:
    """Return a value as text that is the same in every process, or nothing for what has none."""
    match value:
        case None | bool() | int() | float() | str():
            return repr(value)
        case list() | tuple():
            return f"({', '.join(map(_setting, cast('Iterable[object]', value)))})"
        case FunctionType():
            return f"{value.__module__}.{value.__qualname__}"
        case _:
            return ""


def _digest_of(dataset: Any) -> str:  # noqa: ANN401  # a ``zephon.Dataset``
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    digest.update(repr(list(map(int, dataset.counts()))).encode())
    root = None if dataset.path is None else Path(dataset.path)
    if root is not None and root.exists():
        files = sorted(path for path in root.rglob("*") if path.is_file()) if root.is_dir() else [root]
        for path in files:
            digest.update(path.relative_to(root).as_posix().encode())
            _add_content(digest, path)
    shards = dataset.backend.get("shards")
    if isinstance(shards, Mapping):
        for number in sorted(cast("Mapping[int, Any]", shards)):
            digest.update(repr(shards[number].getsamples(list(range(len(shards[number]))))).encode())
    return digest.hexdigest()


def _add_content(digest: "hashlib.blake2b", path: Path) -> None:
    size = path.stat().st_size
    digest.update(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE_FILE_BYTES:
            digest.update(file.read())
            return
        for probe in range(_NUM_PROBES):
            file.seek((size - _PROBE_BYTES) * probe // (_NUM_PROBES - 1))
            digest.update(file.read(_PROBE_BYTES))
