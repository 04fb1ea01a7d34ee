"""Load a checkpoint over all ranks: find one, hold it against its record and against what is asked for, read it."""

import difflib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from d9d.checkpoint.documents import Document, filled, with_room
from d9d.checkpoint.folder import CheckpointFolder, SavedCheckpoint
from d9d.checkpoint.planners import ValuesAsJsonLoadPlanner
from d9d.checkpoint.safe_reader import SafeReader
from d9d.core.participants import Participants

__all__ = [
    "OnChangedParameters",
    "OnCorrupt",
    "find_checkpoint",
    "load_document",
    "load_state",
    "read_flat",
    "read_metadata",
    "verify_checkpoint",
]

OnCorrupt: TypeAlias = Literal["raise", "fallback"]
"""What to do where the newest checkpoint is damaged: refuse to start, or take the newest one that is not."""

OnChangedParameters: TypeAlias = Literal["raise", "allow"]
"""What to do about parameters that only the checkpoint or only the job has: refuse to resume, or go on without them."""

_NUM_SHOWN = 20


def find_checkpoint(
    folder: CheckpointFolder,
    participants: Participants,
    on_corrupt: OnCorrupt,
    logger: logging.Logger,
    *,
    verified: SavedCheckpoint | None = None,
) -> SavedCheckpoint | None:
    """Return the newest complete checkpoint whose files are what was written. All ranks must call it; reads all files.

    The first rank decides what there is; each rank reads a part of the files.

    Args:
        folder: The checkpoints of the run.
        participants: The ranks.
        on_corrupt: What to do about a damaged one.
        logger: Where the first rank tells about damaged ones that are passed over.
        verified: One whose files this job has read before; they are not read again.

    Raises:
        ValueError: If the newest is damaged, or with ``fallback`` all are; it names the files and the next older one.
    """
    complete: list[SavedCheckpoint] = []
    with participants.failing_together():
        if participants.rank == 0:
            folder.recover()
            complete = folder.complete()
    complete = participants.gather(complete)[0]
    damage: list[str] = []
    for index, saved in enumerate(reversed(complete)):
        if saved == verified:
            return saved
        problems = verify_checkpoint(saved, participants)
        if not problems:
            return saved
        damage += problems
        has_older = index + 1 < len(complete)
        if on_corrupt == "raise" or not has_older:
            break
        if participants.rank == 0:
            logger.warning("passing over %s: %s", saved.path, "; ".join(problems[:_NUM_SHOWN]))
    if not damage:
        return None
    text = "".join(f"\n- {problem}" for problem in damage[:_NUM_SHOWN])
    mend = (
        f"The next older one is {complete[-2].path}: set checkpointing.on_corrupt to 'fallback' to take the newest intact one"
        if len(complete) > 1 and on_corrupt == "raise"
        else "Restore it from a copy, or remove it and start anew"
    )
    raise ValueError(f"the newest checkpoint {complete[-1].path} is damaged:{text}\n{mend}.")


def verify_checkpoint(saved: SavedCheckpoint, participants: Participants | None = None) -> list[str]:
    """Return what is wrong with a checkpoint. All ranks must call it; reads all files, each on one rank.

    Args:
        saved: The checkpoint.
        participants: The ranks; by default this process alone.
    """
    participants = participants or Participants()
    if saved.record is None:
        return [saved.damage]
    problems = saved.record.size_problems(saved.path)
    if not any(participants.gather(bool(problems))):
        files = saved.record.files
        by_size = sorted(files, key=lambda name: files[name].size_bytes, reverse=True)
        problems = saved.record.content_problems(saved.path, by_size[participants.rank :: participants.size])
    of_all = [problem for of_rank in participants.gather(problems) for problem in of_rank]
    return list(dict.fromkeys(of_all))


def read_metadata(path: Path) -> Metadata:
    """Return what tensors and values a checkpoint holds.

    Raises:
        ValueError: If its metadata is anything else.
    """
    return SafeReader(path).read_metadata()


# Any: states hold what their owners choose.
def load_state(
    path: Path,
    state: dict[str, Any],
    group: dist.ProcessGroup | None,
    *,
    metadata: Metadata | None = None,
    may_be_left: Callable[[str], bool] = lambda key: False,
) -> dict[str, Any]:
    """Read a checkpoint into the tensors of a state. All ranks must call it; blocks.

    Each rank reads the parts of tensors that it has. Nothing is changed unless all of it fits.

    Args:
        path: Folder of the checkpoint.
        state: Tensors and DTensors, which are read into; values and documents.
        group: All ranks, over gloo; None for a process on its own.
        metadata: What the checkpoint holds, if it was read before.
        may_be_left: Tells by its key what the checkpoint may hold though no rank asks for it.

    Returns:
        The state, with values and the content of documents as they were saved.

    Raises:
        ValueError: If the checkpoint does not hold what is asked for, or holds something else too; on all ranks, with all
            names.
    """
    participants = Participants([] if group is None else [group])
    with participants.failing_together():
        metadata = metadata or read_metadata(path)
        saved_form = with_room(state, metadata)
        flat, _ = flatten_state_dict(saved_form)
        problems = _misfits(flat, metadata)
        if problems:
            raise ValueError(_text(path, problems))
    left = [key for key in _asked_by_nobody(flat, metadata, group) if not may_be_left(key)]
    if left:
        raise ValueError(_text(path, [f"it holds {key}, and the job has nothing of that name" for key in left]))
    with participants.failing_together():
        read_flat(path, saved_form, metadata)
        return filled(state, saved_form)


def load_document(path: Path, key: str, metadata: Metadata) -> Any:  # noqa: ANN401
    """Read a document of a checkpoint, with whole tensors. Not collective.

    Args:
        path: Folder of the checkpoint.
        key: Name of the document.
        metadata: What `read_metadata` returned for it.

    Raises:
        ValueError: If there is no document of that name.
    """
    state = {key: Document(None)}
    saved_form = with_room(state, metadata)
    flat, _ = flatten_state_dict(saved_form)
    if problems := _misfits(flat, metadata):
        raise ValueError(f"{path} holds something else: {problems[0]}")
    try:
        return filled(state, read_flat(path, saved_form, metadata))[key]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} does not hold a document {key}: {error!r}") from error


def read_flat(path: Path, state: dict[str, Any], metadata: Metadata) -> dict[str, Any]:
    """Read what a state asks for, without any check. Not collective: each rank plans what it reads on its own.

    Returns:
        The state.
    """
    planner, reader = ValuesAsJsonLoadPlanner(), SafeReader(path)
    planner.set_up_planner(state, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return state


def _misfits(flat: Mapping[str, Any], metadata: Metadata) -> list[str]:
    """Return what a checkpoint does not hold as it is asked for."""
    problems: list[str] = []
    for key, wanted in flat.items():
        saved = metadata.state_dict_metadata.get(key)
        if saved is None:
            near = difflib.get_close_matches(key, metadata.state_dict_metadata, n=2)
            problems.append(f"{key} is not in it" + (f" (it holds {', '.join(near)})" if near else ""))
        elif isinstance(saved, TensorStorageMetadata) != isinstance(wanted, torch.Tensor):
            is_tensor = isinstance(saved, TensorStorageMetadata)
            problems.append(f"{key} is {'a tensor' if is_tensor else 'no tensor'} there, and not so in the job")
        elif isinstance(saved, TensorStorageMetadata):
            of_job = cast(torch.Tensor, wanted)
            if saved.size != of_job.shape:
                problems.append(f"{key} has the shape {tuple(saved.size)} there and {tuple(of_job.shape)} in the job")
            if saved.properties.dtype != of_job.dtype:
                problems.append(f"{key} is of {saved.properties.dtype} there and of {of_job.dtype} in the job")
    return problems


def _asked_by_nobody(flat: Mapping[str, Any], metadata: Metadata, group: dist.ProcessGroup | None) -> list[str]:
    """Return what a checkpoint holds and no rank asks for. A collective."""
    keys = sorted(metadata.state_dict_metadata)
    asked = torch.tensor([key in flat for key in keys], dtype=torch.uint8)
    if group is not None:
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=group)
    return [key for key, is_asked in zip(keys, asked.tolist(), strict=True) if not is_asked]


def _text(path: Path, problems: list[str]) -> str:
    lines = "".join(f"\n- {problem}" for problem in problems[:_NUM_SHOWN])
    more = f"\n- and {len(problems) - _NUM_SHOWN} more" if len(problems) > _NUM_SHOWN else ""
    return f"cannot resume from the checkpoint {path}:{lines}{more}"
