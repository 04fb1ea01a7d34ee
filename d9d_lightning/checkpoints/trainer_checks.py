"""What is wrong with the checkpoints that a Trainer is going to save, found before it trains."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from d9d.checkpoint import check_document
from d9d.core.dist_context import DistributedContext
from d9d.core.participants import Participants

__all__ = ["check_checkpoints", "check_storable", "local_path", "plugin_problems", "saves_in_background"]


def saves_in_background(plugin: CheckpointIO | None) -> bool:
    """Tell whether the user wants training to go on while checkpoints are written, as Lightning lets them ask for it."""
    return isinstance(plugin, AsyncCheckpointIO)


def plugin_problems(plugin: CheckpointIO | None) -> list[str]:
    """Say what is wrong with a checkpoint plugin."""
    # An AsyncCheckpointIO gets Lightning's own one to wrap where the user has given it none.
    inner = plugin.checkpoint_io if isinstance(plugin, AsyncCheckpointIO) else plugin
    if inner is None or type(inner) is TorchCheckpointIO:
        return []
    text = (
        f"{type(inner).__name__} would not be called: all ranks write a checkpoint together, to a folder. Leave it out, or "
        f"make files for other tools by `python -m d9d_lightning consolidate`."
    )
    return [text]


def check_checkpoints(
    trainer: Trainer, module: LightningModule, context: DistributedContext | None, plugin: CheckpointIO | None
) -> list[Path]:
    """Refuse to train where checkpoints of callbacks could not be saved. All ranks must call it.

    Args:
        trainer: Has the callbacks.
        module: That it trains.
        context: Ranks of the job; None on one process.
        plugin: What the user has given the Trainer.

    Returns:
        The folders that callbacks save to, each once.

    Raises:
        OSError, TypeError, ValueError: On all ranks, with how to mend it.
    """
    callbacks = trainer.checkpoint_callbacks
    # Lightning sets it where a type checker does not look.
    if not callbacks or vars(trainer).get("fast_dev_run"):
        return []
    participants = Participants([] if context is None else [context.groups[0]])
    folders: dict[Path, None] = {}
    with participants.failing_together():
        check_storable({module.CHECKPOINT_HYPER_PARAMS_KEY: dict(module.hparams)})
        for callback in callbacks:
            folder = _check_callback(callback, in_background=saves_in_background(plugin))
            if folder is not None:
                folders[folder.resolve()] = None
                if participants.rank == 0:
                    _check_writable(folder)
    return list(folders)


def _check_callback(callback: Checkpoint, *, in_background: bool) -> Path | None:
    """Return the folder that a callback saves to, if it has one."""
    if in_background and isinstance(callback, ModelCheckpoint) and callback.save_last == "link":
        raise ValueError(
            "ModelCheckpoint(save_last='link') with AsyncCheckpointIO: for a while the link would lead to a checkpoint that is "
            "not written yet. Use save_last=True, or save in the foreground."
        )
    folder = vars(callback).get("dirpath")
    return None if folder is None else local_path(folder)


def _check_writable(path: Path) -> None:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        # Its permissions alone do not tell.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise OSError(
            f"checkpoints cannot be saved to {path}: nothing can be written to {existing} ({error})."
        ) from error


def local_path(path: str | Path) -> Path:
    """Return the path of a folder for a checkpoint.

    Raises:
        ValueError: If it is not on a file system of this machine.
    """
    files, local = url_to_fs(str(path))
    if not isinstance(files, LocalFileSystem):
        raise ValueError(
            f"{path} is no path of a file system: checkpoints of D9DStrategy are folders that all ranks write to. Save to a "
            f"shared folder, and copy from there."
        )
    return Path(local)


def check_storable(checkpoint: Mapping[str, Any]) -> None:
    """Refuse what a checkpoint cannot hold without pickling it.

    Raises:
        TypeError: With its place, and how to mend it.
    """
    for entry, content in checkpoint.items():
        try:
            check_document(dict(content) if isinstance(content, Mapping) else content, entry)
        except TypeError as error:
            raise TypeError(f"{error} {_HINTS.get(entry, _HINT)}") from error


_HINT = "If a hook on_save_checkpoint or a callback has put it there, let it put such values there."
_HINTS = {
    "hyper_parameters": "Leave out hyper-parameters of other types: self.save_hyperparameters(ignore=[...]).",
    "datamodule_hyper_parameters": "Leave out hyper-parameters of other types: self.save_hyperparameters(ignore=[...]).",
}
