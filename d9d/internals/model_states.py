"""What jobs do around model states: look at a source before they start, and fail on all ranks together."""

import contextlib
import difflib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from d9d.core.dist_context import DistributedContext
from d9d.model_state.io.files import find_files
from d9d.model_state.io.participants import Participants

__all__ = ["failing_together", "huggingface_cache_root", "share_buffers", "source_problems"]


def source_problems(option: str, source: Path) -> list[str]:
    """Say why a path can not be a model state, as far as it shows without opening the files of tensors.

    Args:
        option: Name of the setting that names the path.
        source: Folder of a model state, or one file.
    """
    where = f"{option} ({source})"
    if not source.exists():
        parent = source.absolute().parent
        near = difflib.get_close_matches(
            source.name, [path.name for path in parent.iterdir()] if parent.is_dir() else [], n=1
        )
        hint = f"did you mean {source.with_name(near[0])}?" if near else "name the folder of a model state."
        return [f"{where} does not exist: {hint}"]
    if (source / ".metadata").is_file():
        return [
            f"{where} is a training checkpoint, not a model state: export one from it, and name the folder of that."
        ]
    files = find_files(source, cache_root=huggingface_cache_root(source), allow_bin=False)
    return [f"{where}: {problem}" for problem in files.problems]


def huggingface_cache_root(source: Path) -> Path | None:
    """Return the folder that the links of a model state may lead to, if it lies in the cache of Hugging Face.

    There ``snapshots/<revision>`` holds links into ``blobs`` of the same model. None for any other folder.
    """
    snapshots = source.absolute().parent
    is_cache = snapshots.name == "snapshots" and (snapshots.parent / "blobs").is_dir()
    return snapshots.parent if is_cache else None


def failing_together(context: DistributedContext | None) -> contextlib.AbstractContextManager[None]:
    """Raise on all ranks what any of them raises in the block. All ranks must enter it; a collective at its end.

    The block must not communicate itself. See `Participants.raise_together`.

    Args:
        context: Ranks of the job; None, or not distributed, on one process.
    """
    groups = [] if context is None or not context.is_distributed else [context.groups[0]]
    return Participants(groups).failing_together()


@torch.no_grad()
def share_buffers(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Overwrite plain buffers, such as running statistics, with those of the first rank. All ranks must call it.

    Several ranks write an export, and their files must not mix what each of them has counted.

    Args:
        module: The module.
        group: Ranks with the same module and different samples.
    """
    for buffer in module.buffers():
        if buffer.numel() and not isinstance(buffer, DTensor):
            values = buffer.contiguous()
            dist.broadcast(values.reshape(-1).view(torch.uint8), group=group, group_src=0)
            if values is not buffer:
                buffer.copy_(values)
