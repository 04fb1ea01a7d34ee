"""Checkpoints as plain Lightning has them: whole, on one process, in memory or in a file."""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch import LightningModule

from d9d.checkpoint import CheckpointPath, verify_checkpoint
from d9d.checkpoint.inspection import is_checkpoint
from d9d.checkpoint.writer import sync_folder
from d9d_lightning.checkpoints.contents import Checkpoint, checkpoint_from
from d9d_lightning.checkpoints.restore import NAMES_KEY, TRAINABLE_KEY
from d9d_lightning.checkpoints.saved_tensors import SavedFiles, SavedTensors
from d9d_lightning.checkpoints.stage_optimizers import StageCut
from d9d_lightning.checkpoints.store import CheckpointStore

__all__ = ["CheckpointFolders", "collect_model_state", "consolidate", "read_checkpoint", "register_folders"]

_log = logging.getLogger(__name__)


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Return a checkpoint folder as plain Lightning would have it, with whole tensors on the host. Reads all files.

    Args:
        path: Folder of the checkpoint, or a link to it.

    Raises:
        FileNotFoundError: If there is no complete checkpoint.
        ValueError: If it is damaged.
    """
    folder = Path(path).resolve()
    saved = CheckpointPath(folder, _log).complete()
    if problems := verify_checkpoint(saved):
        raise ValueError(f"the checkpoint {folder} is damaged: {'; '.join(problems[:20])}")
    checkpoint = checkpoint_from(SavedFiles(folder))
    return {entry: _in_memory(entry, content) for entry, content in checkpoint.items() if entry != TRAINABLE_KEY}


def _in_memory(entry: str, content: Any) -> Any:  # noqa: ANN401  # whatever was dumped
    if isinstance(content, SavedTensors):
        return content.copy()
    if entry != "optimizer_states":
        return content
    return [
        {
            key: {index: _plain(values) for index, values in value.items()} if key == "state" else value
            for key, value in state.items()
            if key != NAMES_KEY
        }
        for state in content
    ]


def _plain(values: Any) -> Any:  # noqa: ANN401
    return dict(values.copy()) if isinstance(values, SavedTensors) else values


def consolidate(folder: str | Path, file: str | Path) -> None:
    """Write a checkpoint folder to one file that plain Lightning loads: whole tensors, complete or not there.

    Takes memory for all of it.

    Args:
        folder: Folder of the checkpoint, or a link to it.
        file: Where to; one that is there is replaced.

    Raises:
        FileNotFoundError: If there is no complete checkpoint.
        ValueError: If it is damaged.
        OSError: If the file cannot be written.
    """
    checkpoint, file = read_checkpoint(folder), Path(file)
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder. Name a file to write to.")
    partial = file.with_name(f".{file.name}.partial")
    try:
        with partial.open("wb") as stream:
            torch.save(checkpoint, stream)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(file.absolute().parent)


def collect_model_state(
    module: LightningModule, store: CheckpointStore, cut: StageCut | None, broadcast: Callable[[str], str]
) -> dict[str, Any]:
    """Return the state dict of the whole module on rank 0, through a temporary folder. All ranks of one machine must call it.

    Args:
        module: The module, or the part of it that this rank has.
        store: Saves it.
        cut: The whole module, if it is cut into pipeline stages.
        broadcast: Returns the value of rank 0 on all ranks.
    """
    folder = Path(broadcast(tempfile.mkdtemp() if store.is_first else ""))
    try:
        store.save({"state_dict": module.state_dict()}, folder / "weights", module, (), cut)
        return read_checkpoint(folder / "weights")["state_dict"] if store.is_first else {}
    finally:
        if store.is_first:
            shutil.rmtree(folder, ignore_errors=True)


class CheckpointFolders(LocalFileSystem):
    """Local files, and among them checkpoint folders that open as the file which `consolidate` would make of them.

    [Note: opening folders]
    ``Module.load_from_checkpoint(path)`` and the strategies of Lightning open a path by ``fsspec``. Registered there for
    local paths, this class lets them load checkpoint folders, verified and without pickles of others. Everything else is
    as it was: nobody but us opens folders for reading.
    """

    # Any: what fsspec leaves open.
    def open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Open a file, or a checkpoint folder for reading."""
        local = cast(str, self._strip_protocol(path))
        if mode == "rb" and os.path.isdir(local) and is_checkpoint(Path(local)):  # noqa: PTH112  # before most opens
            return _as_file(Path(local))
        return super().open(path, mode, *args, **kwargs)


def _as_file(folder: Path) -> BinaryIO:
    # On the disk, so that there are never two copies of it in memory.
    file = tempfile.TemporaryFile()  # noqa: SIM115  # the caller closes it
    torch.save(read_checkpoint(folder), file)
    file.seek(0)
    return file


def register_folders() -> None:
    """Let everything that opens local paths by ``fsspec`` open checkpoint folders too. See [Note: opening folders]."""
    for protocol in ("file", "local"):
        fsspec.register_implementation(protocol, CheckpointFolders, clobber=True)
