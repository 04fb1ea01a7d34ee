"""What jobs do around model states: look at a source before they start, and fail on all ranks together."""

import contextlib
import fnmatch
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from d9d.core.dist_context import DistributedContext
from d9d.core.participants import Participants
from d9d.model_state.io.files import find_files
from d9d.model_state.mapper.names import NearestNames

__all__ = ["failing_together", "huggingface_cache_root", "names_to_load", "source_problems"]


def source_problems(option: str, source: Path) -> list[str]:
    """Say why a path can not be a model state, as far as it shows without opening the files of tensors.

    Args:
        option: Name of the setting that names the path.
        source: Folder of a model state, or one file.
    """
    where = f"{option} ({source})"
    if not source.exists():
        parent = source.absolute().parent
        near = NearestNames([path.name for path in parent.iterdir()] if parent.is_dir() else [])
        return [f"{where} does not exist{near.hint(source.name)}: name the folder of a model state."]
    if (source / ".metadata").is_file():
        return [
            f"{where} is a training checkpoint, not a model state: export one from it, and name the folder of that."
        ]
    files = find_files(source, cache_root=huggingface_cache_root(source), allow_bin=False)
    return [f"{where}: {problem}" for problem in files.problems]


def huggingface_cache_root(source: Path) -> Path | None:
    """Return the folder that the links of a model state may lead to, if it lies in the cache of Hugging Face.

    There ``snapshots/<revision>`` and folders in it hold links into ``blobs`` of the same model. None for anything else.

    Args:
        source: Folder of a model state, or one file.
    """
    roots = [folder.parent for folder in source.absolute().parents if folder.name == "snapshots"]
    return next((root for root in roots if (root / "blobs").is_dir()), None)


def names_to_load(module: nn.Module, keep: Sequence[str]) -> frozenset[str]:
    """Return the parameters and buffers that a model state must bring, so that they need no first values.

    Args:
        module: The module, with or without memory.
        keep: Patterns, as of `fnmatch`, of the names that stay as they are.
    """
    names = module.state_dict(keep_vars=True)
    return frozenset(name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in keep))


def failing_together(context: DistributedContext | None) -> contextlib.AbstractContextManager[None]:
    """Raise on all ranks what any of them raises in the block. All ranks must enter it; a collective at its end.

    The block must not communicate itself. See `Participants.raise_together`.

    Args:
        context: Ranks of the job; None, or not distributed, on one process.
    """
    groups = [] if context is None or not context.is_distributed else [context.groups[0]]
    return Participants(groups).failing_together()
