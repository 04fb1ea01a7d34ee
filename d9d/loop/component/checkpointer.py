"""Write and find the training checkpoints of a run."""

import contextlib
import re
import shutil
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from d9d.core.dist_context import DistributedContext
from d9d.loop.component.garbage_collector import ManualGarbageCollector
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.config import CheckpointingConfig

STATE_KEY = "state"
"""Key of the state of the job in a checkpoint."""

_COMPLETE = re.compile(r"save-([0-9]+)")
_METADATA = ".metadata"

SavedTensors = dict[str, TensorStorageMetadata | None]
"""What a checkpoint holds, by flattened key; None for values that are not tensors."""


@runtime_checkable
class PreparesToLoad(Protocol):
    """A state that must see what a checkpoint holds before it can say where to load it to."""

    def prepare_to_load(self, saved: SavedTensors) -> None:
        """Make room for the saved tensors, so that ``state_dict()`` has an entry for each of them."""
        ...


class StateCheckpointer:
    """Saves the state of a job as PyTorch Distributed Checkpoints, and resumes from the newest complete one.

    A checkpoint is written to ``save-<step>.partial`` and renamed to ``save-<step>`` when all ranks have written their
    shards, so that a name without suffix is a complete checkpoint. Rank 0 decides which one is the newest.
    """

    def __init__(
        self,
        dist_context: DistributedContext,
        schedule: JobSchedule,
        config: CheckpointingConfig,
        gc: ManualGarbageCollector,
        run_name: str | None,
    ) -> None:
        """Locate the checkpoints of a run, below a folder of its name if it has one."""
        self._dist_context = dist_context
        self._schedule = schedule
        self._config = config
        self._gc = gc
        self.save_dir = checkpoint_dir(config, run_name)
        """Folder of the checkpoints of the run."""

    def checkpoint_if_needed(self, state: Stateful) -> None:
        """Save after a step that the config selects. All ranks must call it after `JobSchedule.step`; blocks."""
        if self._schedule.should_do_action(
            self._config.period_steps, enable_on_last_step_if_periodic=True, is_post_step_action=True
        ):
            self._save(state)

    def _save(self, state: Stateful) -> None:
        final = self.save_dir / f"save-{self._schedule.current_step}"
        partial = final.with_name(f"{final.name}.partial")
        self._gc.collect_forced()
        self._on_main_process(partial, lambda: _make_empty(partial))
        with quiet_on_one_process():
            state_dict_saver.save(
                {STATE_KEY: state.state_dict()}, checkpoint_id=partial, no_dist=not self._dist_context.is_distributed
            )
        # It returns on a rank once rank 0 has written the metadata, which comes last.
        self._on_main_process(final, lambda: self._commit(partial, final))

    def _on_main_process(self, path: Path, action: Callable[[], None]) -> None:
        """Run an action on rank 0 while the others wait, and fail on all ranks if it fails.

        Raises:
            RuntimeError: With the path and the reason.
        """
        cause: OSError | None = None
        if self._dist_context.is_main_process:
            try:
                action()
            except OSError as error:
                cause = error
        reason = [None if cause is None else str(cause)]
        if self._dist_context.is_distributed:
            dist.broadcast_object_list(reason, src=0)
        if reason[0] is not None:
            raise RuntimeError(f"rank 0 could not write the checkpoint {path}: {reason[0]}") from cause

    def _commit(self, partial: Path, final: Path) -> None:
        """Give a complete checkpoint its name, and only then remove older ones."""
        replaced = final.with_name(f"{final.name}.replaced")
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        if self._config.num_to_keep is not None:
            for _, path in _list_complete(self.save_dir)[: -self._config.num_to_keep]:
                shutil.rmtree(path)
        self._dist_context.logger.info("saved checkpoint %s", final)

    def load_last_checkpoint(self, state: Stateful) -> bool:
        """Resume from the newest complete checkpoint, and return whether there is one. All ranks must call it; blocks."""
        path = find_newest_checkpoint(self._dist_context, self.save_dir)
        if path is None:
            return False
        metadata = filesystem.FileSystemReader(path).read_metadata()
        saved: SavedTensors = {
            key.removeprefix(f"{STATE_KEY}."): value if isinstance(value, TensorStorageMetadata) else None
            for key, value in metadata.state_dict_metadata.items()
        }
        if isinstance(state, PreparesToLoad):
            state.prepare_to_load(saved)
        # Any: state dicts hold what their owners choose.
        loaded: dict[str, Any] = {STATE_KEY: state.state_dict()}
        try:
            with quiet_on_one_process():
                state_dict_loader.load(loaded, checkpoint_id=path, no_dist=not self._dist_context.is_distributed)
        except (CheckpointException, RuntimeError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[-1:]
            raise RuntimeError(
                f"cannot resume from the checkpoint {path}: {''.join(reason)}. If model, optimizer or metrics were changed "
                f"since it was written, start another run (run.name), or delete it."
            ) from error
        state.load_state_dict(loaded[STATE_KEY])
        if self._dist_context.is_main_process:
            self._dist_context.logger.info("resumed from %s", path)
        return True


def checkpoint_dir(config: CheckpointingConfig, run_name: str | None) -> Path:
    """Return the folder of the checkpoints of a run, or of a job without a name."""
    return config.save_dir if run_name is None else config.save_dir / run_name


def find_newest_checkpoint(dist_context: DistributedContext, save_dir: Path) -> Path | None:
    """Return the newest complete checkpoint as rank 0 sees it, or None. All ranks must call it; blocks."""
    newest: list[str | None] = [None]
    if dist_context.is_main_process:
        complete = _list_complete(save_dir)
        newest = [str(complete[-1][1]) if complete else None]
    if dist_context.is_distributed:
        dist.broadcast_object_list(newest, src=0)
    return None if newest[0] is None else Path(newest[0])


def _list_complete(save_dir: Path) -> list[tuple[int, Path]]:
    """Return the complete checkpoints, oldest step first."""
    if not save_dir.is_dir():
        return []
    found = [
        (int(match.group(1)), path)
        for path in save_dir.iterdir()
        if (match := _COMPLETE.fullmatch(path.name)) and not path.is_symlink() and (path / _METADATA).is_file()
    ]
    return sorted(found)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


@contextlib.contextmanager
def quiet_on_one_process() -> Generator[None]:
    """Leave out torch's warning that there is no process group: we asked for that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def room_for(saved: TensorStorageMetadata, device: torch.device) -> torch.Tensor:
    """Allocate a plain tensor that a saved one fits into."""
    return torch.empty(saved.size, dtype=saved.properties.dtype, device=device)
