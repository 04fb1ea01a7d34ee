"""Checkpoints of a Trainer on all of its ranks: saved as folders, verified and read, removed.

[Note: who has a path]
Each rank asks Lightning which checkpoint it resumes from, and each may see another state of a shared disk. Ranks with a path
load it before the strategy is set up. So loading begins with an exchange of paths, and so does the set-up of a rank that has
loaded nothing: ranks that disagree meet there.

[Note: one fit at a time]
A fit holds a lock of each folder that its callbacks save to, until it is over: another one would give its checkpoints the same
names, and each would remove those of the other. Whoever only reads takes none. The lock is waited for: when a job is killed, its
data loaders need some seconds to notice.
"""

# Lightning shares these with its own strategies only
# pyright: reportPrivateUsage=false

import contextlib
import logging
import weakref
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerStatus
from torch.optim import Optimizer

from d9d.checkpoint import CheckpointPath, CheckpointSaver, Document, verify_checkpoint
from d9d.checkpoint.inspection import is_checkpoint
from d9d.checkpoint.single import no_checkpoint
from d9d.core.device import random_state, set_random_state
from d9d.core.directory_lock import DirectoryLock
from d9d.core.dist_context import DistributedContext
from d9d.core.participants import Participants
from d9d.pipelining.p2p import close_group
from d9d_lightning.checkpoints.contents import Checkpoint, checkpoint_from, state_to_save
from d9d_lightning.checkpoints.saved_tensors import SavedFiles
from d9d_lightning.checkpoints.stage_optimizers import StageCut, named_groups
from d9d_lightning.checkpoints.trainer_checks import check_checkpoints, check_storable, local_path, saves_in_background
from d9d_lightning.data.loader_states import gather_loader_states
from d9d_lightning.jobs.failures import RunFailure

__all__ = ["CheckpointStore"]

_log = logging.getLogger(__name__)

_TIMEOUT_S = 1800.0
"""Time limit of what ranks exchange about a checkpoint: one of them may write or hash for long."""
_LIMIT_AFTER_FAILURE_S = 5.0
"""Time that a checkpoint in the background has left when the run fails for another reason."""
_LOCK_NAME = ".lock"
_LOCK_WAIT_S = 15.0
_RANDOM, _MESH = "random_states", "mesh"
_NUM_SHOWN = 20

_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
"""Groups for checkpoints alone, by the group of the job and by purpose. Not by context: garbage collection takes that at
another time on each rank, and then one of them would make its groups anew."""


@final
class CheckpointStore:
    """Saves and loads the checkpoints of the runs of a Trainer. All ranks must make the same calls."""

    def __init__(self) -> None:
        self._context: DistributedContext | None = None
        self._failure: RunFailure | None = None
        self._participants = Participants()
        self._device = torch.device("cpu")
        self._saves_in_background = False
        self._saver: CheckpointSaver | None = None
        self._to_remove: list[Path] = []
        self._random_state: Mapping[str, torch.Tensor] | None = None
        self._has_agreed = False
        self._locks = contextlib.ExitStack()

    def begin(self, device: torch.device, plugin: CheckpointIO | None) -> None:
        """Begin a run.

        Args:
            device: Device of this rank.
            plugin: What the user has given the Trainer; see `saves_in_background`.
        """
        self._device = device
        self._saves_in_background = saves_in_background(plugin)
        self._random_state = None
        self._has_agreed = False

    def join(self, context: DistributedContext, failure: RunFailure | None) -> None:
        """Be one of several ranks.

        Args:
            context: Ranks of the job.
            failure: Finds out whether the others have failed too, where this one has.
        """
        self._context = context
        self._failure = failure
        self._participants = Participants([context.groups[0]])

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides."""
        return self._participants.rank == 0

    @property
    def _is_alone(self) -> bool:
        return self._failure is not None and self._failure.is_alone  # See [Note: failing alone].

    # Saving

    def begin_fit(self, trainer: Trainer, module: LightningModule, plugin: CheckpointIO | None) -> None:
        """Find what keeps callbacks from saving, and keep other fits from their folders. See [Note: one fit at a time].

        All ranks must call it.

        Raises:
            OSError, TypeError, ValueError: On all ranks: another fit saves to such a folder, or see `check_checkpoints`.
        """
        folders = check_checkpoints(trainer, module, self._context, plugin)
        # Over groups without the limit of a step: another job may just be ending.
        with self._in_foreground().failing_together():
            for folder in folders if self.is_first else ():
                self._lock(folder)

    def _lock(self, folder: Path) -> None:
        lock = DirectoryLock(
            folder / _LOCK_NAME,
            f"another fit that saves checkpoints to {folder}",
            "Wait for its end, or let this one save elsewhere (ModelCheckpoint(dirpath=...)).",
            wait_s=_LOCK_WAIT_S,
            # A fit that has saved nothing removes the folder at its end, while this one waits.
            make_directory=partial(self._make, folder),
        )
        self._locks.callback(lock.release)

    def _make(self, folder: Path) -> None:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            self._locks.callback(_remove_if_empty, folder)

    def end(self) -> None:
        """Wait for the checkpoint that is being written, and let others save to the folders of a fit. Not collective.

        Raises:
            OSError, RuntimeError: If it could not be written.
        """
        with self._locks:
            self.wait()

    def save(
        self,
        checkpoint: Checkpoint,
        path: str | Path,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        cut: StageCut | None,
        storage_options: object | None = None,
    ) -> None:
        """Save a checkpoint to a folder. All ranks must call it.

        Blocks until it is complete or, in the background, until what is saved has been copied. That is so during a run only:
        nobody waits for it afterwards. Where some ranks have failed nothing is saved; where all have, what fails is told
        rather than raised.

        Args:
            checkpoint: What Lightning has dumped on this rank.
            path: Its folder; that of rank 0 counts.
            module: The module, or the part of it that this rank has.
            optimizers: Those in ``checkpoint["optimizer_states"]``.
            cut: The whole module, if it is cut into pipeline stages.
            storage_options: Refused.

        Raises:
            OSError, RuntimeError, TypeError, ValueError: If it, or the one before it, cannot be saved; on all ranks, with the
                path and the reason.
        """
        if storage_options is not None:
            raise TypeError("D9DStrategy writes checkpoints to a file system, and takes no storage_options.")
        if self._is_alone:
            return
        is_running = module._trainer is not None and module._trainer.state.status == TrainerStatus.RUNNING
        try:
            self._save(checkpoint, path, module, optimizers, cut, in_foreground=not is_running)
        except (OSError, RuntimeError, ValueError) as error:
            if self._failure is None or not self._failure.is_interrupted:
                raise
            # What has interrupted the run must not be hidden by this.
            self._failure.give_up(error)

    def _save(
        self,
        checkpoint: Checkpoint,
        path: str | Path,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        cut: StageCut | None,
        *,
        in_foreground: bool,
    ) -> None:
        self.wait()
        participants = self._in_foreground()
        has_optimizers = "optimizer_states" in checkpoint
        # Over the groups of the steps and with their limit, which is for ranks that do not come. Writing has one of its own.
        with self._participants.failing_together():
            local = local_path(path)
            check_storable(checkpoint)
            groups = [named_groups(module, optimizer) for optimizer in optimizers] if has_optimizers else []
        folder = Path(participants.gather(str(local))[0])
        if self._context is not None:
            gather_loader_states(checkpoint, module, self._context)
        state = state_to_save(checkpoint, module, groups, cut, is_of_first_replica=self._is_of_first_replica(cut))
        if has_optimizers:
            state[_RANDOM] = {str(participants.rank): dict(random_state(self._device))}
            state[_MESH] = Document(self._mesh)
        background = self._in_background() if self._saves_in_background and not in_foreground else None
        saver = CheckpointSaver(CheckpointPath(folder, _log), participants, background)
        saver.save(state, int(checkpoint.get("global_step", 0)))
        self._saver = None if background is None else saver

    def _is_of_first_replica(self, cut: StageCut | None) -> bool:
        if cut is None:
            return self.is_first
        return dist.get_process_group_ranks(cut.group)[0] == 0

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint, when the one that is being written is complete. Rank 0 acts, the others need not call it."""
        if self.is_first and not self._is_alone:
            self._to_remove.append(local_path(path))
            if self._saver is None:
                self._remove_old()

    def _remove_old(self) -> None:
        removed, self._to_remove = self._to_remove, []
        for path in removed:
            CheckpointPath(path, _log).remove()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written. Not collective.

        Raises:
            OSError, RuntimeError: If it could not be written. What it was to replace stays.
        """
        if self._saver is not None:
            with self._keeping_old():
                self._saver.close()
            self._saver = None
            self._remove_old()

    def raise_if_failed(self) -> None:
        """Raise what went wrong in the background, if that is known already. Not collective."""
        if self._saver is not None:
            with self._keeping_old():
                self._saver.raise_if_failed()

    @contextlib.contextmanager
    def _keeping_old(self) -> Generator[None]:
        """Forget the checkpoint that is being written, and what was to be removed behind it, if it has failed."""
        try:
            yield
        except BaseException:
            self._saver = None
            self._to_remove.clear()
            raise

    def abandon(self) -> None:
        """Give the checkpoint that is being written some more time, where the run has failed. Raises nothing."""
        saver, self._saver = self._saver, None
        self._to_remove.clear()
        if saver is not None:
            saver.abandon(_LIMIT_AFTER_FAILURE_S)

    # Loading

    def load(self, path: str | Path, *, weights_only: bool | None) -> Checkpoint:
        """Return a checkpoint: a folder, or a file of plain Lightning. All ranks must call it; reads all files.

        Args:
            path: Where it is; that of rank 0 counts.
            weights_only: As of ``torch.load``, for files. Only an explicit False lets one run code.

        Raises:
            FileNotFoundError: If there is none, on all ranks.
            ValueError: If it is damaged, on all ranks; or if some ranks have none to load.
        """
        self.wait()
        path = self._agree(str(path)) or path
        self._random_state = None
        participants = self._in_foreground()
        is_folder = False
        with participants.failing_together():
            if self.is_first:
                is_folder = _find_folder(path)
        if not participants.gather(is_folder)[0]:
            with participants.failing_together():
                return TorchCheckpointIO().load_checkpoint(path, weights_only=weights_only is not False)
        with participants.failing_together():
            # Through a link, such as that of ModelCheckpoint(save_last="link").
            folder = local_path(path).resolve()
            saved = CheckpointPath(folder, _log).complete()
        problems = verify_checkpoint(saved, participants)
        if problems:
            raise ValueError(_damage(folder, problems))
        with participants.failing_together():
            files = SavedFiles(folder)
            checkpoint = checkpoint_from(files)
            self._random_state = self._own_random_state(files)
        return checkpoint

    def check_agreement(self) -> None:
        """Make sure, in the set-up of a run, that no other rank loads a checkpoint where this one does not.

        All ranks must call it. See [Note: who has a path].

        Raises:
            ValueError: On all ranks, if some have none.
        """
        if not self._has_agreed:
            self._agree(None)
        self._has_agreed = False

    def _agree(self, path: str | None) -> str | None:
        paths = self._participants.gather(path)
        self._has_agreed = True
        without = [str(rank) for rank, of_rank in enumerate(paths) if of_rank is None]
        if 0 < len(without) < len(paths):
            where = next(of_rank for of_rank in paths if of_rank is not None)
            raise ValueError(
                f"some ranks resume from {where}, and rank{'s' if len(without) > 1 else ''} {', '.join(without)} found no "
                f"checkpoint. Do all ranks see the same files? Give fit() the path itself."
            )
        return paths[0]

    @property
    def _mesh(self) -> dict[str, int]:
        """Degrees of the mesh; empty on one process."""
        return {} if self._context is None else self._context.mesh_params.model_dump()

    def _own_random_state(self, files: SavedFiles) -> Mapping[str, torch.Tensor] | None:
        """Return what the random generators of this rank were, if the mesh was this one.

        On another one those of some ranks must be alike that were not.
        """
        prefix = f"{_RANDOM}.{self._participants.rank}."
        if not files.has(f"{prefix}cpu") or files.read_document(_MESH) != self._mesh:
            return None
        rooms = {
            key: files.room_for(f"{prefix}{key}", None) for key in ("cpu", "device") if files.has(f"{prefix}{key}")
        }
        files.read_into({f"{prefix}{key}": room for key, room in rooms.items()})
        return rooms

    def restore_random_state(self) -> bool:
        """Let random numbers go on as they would have behind the checkpoint, once. Not collective.

        Returns:
            Whether they do: there was one, of the same mesh.
        """
        state, self._random_state = self._random_state, None
        if state is None:
            return False
        set_random_state(self._device, dict(state))
        return True

    def _in_foreground(self) -> Participants:
        return self._separate("checkpoints")

    def _in_background(self) -> Participants:
        return self._separate("checkpoints in the background")

    def _separate(self, purpose: str) -> Participants:
        """Return all ranks over a group of their own, which outlives this run. All ranks must call it."""
        if self._context is None:
            return self._participants
        groups = _GROUPS.setdefault(self._context.groups[0], {})
        if purpose not in groups:
            group = self._context.separate_host_group(purpose, _TIMEOUT_S)
            assert group is not None  # a context has several ranks
            groups[purpose] = group
        return Participants([groups[purpose]])

    def close_if_alone(self) -> None:
        """Let ranks that wait for this one in a save or a load fail, if it has failed and they have not. Not collective."""
        if self._context is not None and self._is_alone:
            for group in _GROUPS.get(self._context.groups[0], {}).values():
                close_group(group, torch.device("cpu"))


def _find_folder(path: str | Path) -> bool:
    """Tell whether a path is that of a folder, after a save was finished that had been killed."""
    files, local = url_to_fs(str(path))
    if not isinstance(files, LocalFileSystem):
        return False
    CheckpointPath(Path(local), _log).recover()
    if not Path(local).exists():
        raise no_checkpoint(Path(local))
    return Path(local).is_dir()


def _remove_if_empty(folder: Path) -> None:
    """Leave nothing behind where no checkpoint was saved."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _damage(folder: Path, problems: Sequence[str]) -> str:
    text = "".join(f"\n- {problem}" for problem in problems[:_NUM_SHOWN])
    others = [
        other
        for other in folder.parent.iterdir()
        if other != folder and not other.is_symlink() and other.is_dir() and is_checkpoint(other)
    ]
    newest = max(others, key=lambda other: other.stat().st_mtime, default=None)
    mend = (
        "Restore it from a copy." if newest is None else f"The newest other one there is {newest}: give fit() its path."
    )
    return f"the checkpoint {folder} is damaged:{text}\n{mend}"
