"""Write and find the training checkpoints of a run."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, runtime_checkable

from torch.distributed.checkpoint.stateful import Stateful

from d9d.checkpoint import CheckpointContents, CheckpointSaver, load_state, read_metadata
from d9d.core.dist_context import DistributedContext
from d9d.core.participants import Participants
from d9d.loop.component.garbage_collector import ManualGarbageCollector
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.component.run_checkpoints import STATE_KEY, RunCheckpoints
from d9d.loop.config import CheckpointingConfig, StepActionSpecial

_LIMIT_AFTER_FAILURE_S = 5.0
"""Time that a checkpoint in the background has left when the job fails for another reason."""


@runtime_checkable
class PreparesToLoad(Protocol):
    """A state that must see what a checkpoint holds before it can say where to load it to."""

    # Any: states hold what their owners choose.
    def prepare_to_load(self, contents: CheckpointContents) -> dict[str, Any]:
        """Return room for what is to be loaded, in place of ``state_dict()``."""
        ...

    def may_be_left(self, key: str) -> bool:
        """Tell whether something that a checkpoint holds, and no rank asks for, is no mistake."""
        ...

    @property
    def told(self) -> Sequence[str]:
        """What people should know about what this rank has loaded."""
        ...


class StateCheckpointer:
    """Saves the state of a job after selected steps, and resumes from the newest checkpoint.

    See [Note: complete or not there] for what a killed job leaves, and [Note: a save in the background].
    """

    def __init__(
        self,
        dist_context: DistributedContext,
        schedule: JobSchedule,
        config: CheckpointingConfig,
        gc: ManualGarbageCollector,
        run_name: str | None,
        checkpoints: RunCheckpoints | None = None,
        take_metric: Callable[[str], float | None] = lambda name: None,
        before_save: Callable[[], None] = lambda: None,
    ) -> None:
        """Locate the checkpoints of a run, below a folder of its name if it has one. All ranks must call it.

        Args:
            dist_context: Topology of the job.
            schedule: Number of the step.
            config: When to save, and what to keep.
            gc: Collects garbage before a save.
            run_name: Name of the run.
            checkpoints: The checkpoints, if something has looked for the newest of them before.
            take_metric: Returns on the main rank the value of a metric since it was asked last, if there is one.
            before_save: Writes what was logged: no job that resumes from the checkpoint logs those steps again.
        """
        self._dist_context = dist_context
        self._schedule = schedule
        self._config = config
        self._gc = gc
        self._take_metric = take_metric
        self._before_save = before_save
        self._checkpoints = checkpoints or RunCheckpoints(dist_context, config, run_name)
        self.save_dir = self._checkpoints.save_dir
        """Folder of the checkpoints of the run."""
        in_background: Participants | None = None
        if config.async_save:
            own = dist_context.separate_host_group("checkpoints in the background", config.timeout)
            in_background = Participants([] if own is None else [own])
        self._last_step = 0
        """Step of the newest checkpoint that this process has saved or loaded; 0 for none, when there is nothing to save."""
        self._saver = CheckpointSaver(self._checkpoints.folder, self._checkpoints.participants, in_background)

    @contextlib.contextmanager
    def open(self) -> Generator[None]:
        """Keep other jobs from saving while the block runs, and wait at its end for a checkpoint that is being written.

        All ranks must enter it. See [Note: one job at a time].

        Raises:
            OSError, RuntimeError: If another job saves to the folder, or has saved a newer checkpoint than this one has found;
                or if a checkpoint could not be written, unless the block raised.
        """
        with contextlib.ExitStack() as stack:
            with self._checkpoints.participants.failing_together():
                is_locking = (
                    self._config.period_steps != StepActionSpecial.disable and self._dist_context.is_main_process
                )
                if is_locking:
                    stack.enter_context(self._checkpoints.folder.locked())
                    self._checkpoints.refuse_newer(self._last_step)
            try:
                yield
            except BaseException:
                self._saver.abandon(_LIMIT_AFTER_FAILURE_S)
                raise
            self._saver.close()

    def end_count(self) -> None:
        """Count no more restarts of a job whose steps are done: a script that is restarted begins with it again. No communication."""
        if self._schedule.current_step >= self._schedule.total_steps:
            self._checkpoints.forget_restarts()

    def checkpoint_if_needed(self, state: Stateful) -> None:
        """Save after a step that the config selects. All ranks must call it after `JobSchedule.step`.

        Blocks until the checkpoint is complete or, with ``async_save``, until the state is copied.

        Raises:
            OSError: If it, or the one before it, cannot be written, with its path and the reason; unless ``on_save_failure``
                says otherwise, and steps are left to do.
            RuntimeError: If another rank is gone.
            TypeError: If a part of the job returns a state that cannot be saved without pickling.
        """
        with self._surviving_failures():
            self._saver.raise_if_failed()
        if not self._schedule.should_do_action(
            self._config.period_steps, enable_on_last_step_if_periodic=True, is_post_step_action=True
        ):
            return
        self._save(state, is_last=self._schedule.current_step == self._schedule.total_steps)

    def checkpoint_before_exit(self, state: Stateful) -> None:
        """Save the steps that no checkpoint has, unless the config disables checkpoints. All ranks must call it.

        Blocks and raises as `checkpoint_if_needed` does after the last step.
        """
        with self._saving(), self._surviving_failures():
            self._saver.wait()
        step, logger = self._schedule.current_step, self._dist_context.logger
        if self._config.period_steps == StepActionSpecial.disable:
            logger.warning("no checkpoint of step %d is saved: checkpointing.period_steps is 'disable'.", step)
        elif step != self._last_step:
            self._save(state, is_last=True)

    def _saving(self) -> contextlib.AbstractContextManager[None]:
        return self._dist_context.activity.inside("saving the checkpoint", self._config.timeout)

    def _save(self, state: Stateful, *, is_last: bool) -> None:
        self._gc.collect_forced()
        with self._saving():
            self._before_save()
            with self._surviving_failures():
                self._saver.wait()
            with contextlib.nullcontext() if is_last else self._surviving_failures():
                self._start_save(state, self._schedule.current_step)

    def _start_save(self, state: Stateful, step: int) -> None:
        # state_dict() of a task is code of the user.
        with self._saver.naming(step), self._checkpoints.participants.failing_together():
            saved, metrics = {STATE_KEY: state.state_dict()}, self._metrics()
        self._saver.save(saved, step, after_commit=lambda: self._after_commit(step), metrics=metrics)
        self._last_step = step

    @contextlib.contextmanager
    def _surviving_failures(self) -> Generator[None]:
        """Let the job go on without a checkpoint that cannot be written, where the config says so.

        All ranks have the error, if not at the same step: that of a save in the background when they ask for it.
        """
        try:
            yield
        except OSError as error:
            if self._config.on_save_failure == "raise":
                error.add_note(
                    "To go on without a checkpoint that cannot be written: checkpointing.on_save_failure: continue."
                )
                raise
            self._last_step = 0
            if self._dist_context.is_main_process:
                text = "%s\nThe job goes on without it (checkpointing.on_save_failure is 'continue')."
                self._dist_context.logger.error(text, error)
                # What was written of it may be why there is no room, for logs too. The next save tries once more.
                with contextlib.suppress(OSError):
                    self._checkpoints.folder.remove_leftovers()

    def _after_commit(self, step: int) -> None:
        folder = self._checkpoints.folder
        self._dist_context.logger.info("saved checkpoint %s", folder.final_path(step))
        best = self._config.on_best
        spare = [] if best is None else folder.best_steps(step, best.metric, best.mode, best.num_to_keep)
        folder.purge(step, self._config.num_to_keep, keep_every_steps=self._config.keep_every_steps, spare=spare)

    def _metrics(self) -> dict[str, float]:
        """Return what the main rank knows of how good the checkpoint is."""
        best = self._config.on_best
        if best is None or not self._dist_context.is_main_process:
            return {}
        try:
            value = self._take_metric(best.metric)
        except ValueError as error:
            raise ValueError(f"checkpointing.on_best.metric: {error}") from error
        return {} if value is None else {best.metric: value}

    def load_last_checkpoint(self, state: Stateful) -> bool:
        """Resume from the newest complete checkpoint, and return whether there is one. All ranks must call it; blocks.

        Raises:
            ValueError: If it is damaged, or does not fit the job; on all ranks, with all reasons.
        """
        self._saver.wait()
        with self._dist_context.activity.inside("loading the checkpoint", self._config.timeout):
            return self._load_newest(state)

    def _load_newest(self, state: Stateful) -> bool:
        found = self._checkpoints.newest()
        if found is None:
            return False
        participants = self._checkpoints.participants

        def may_be_left(key: str) -> bool:
            return isinstance(state, PreparesToLoad) and state.may_be_left(key.removeprefix(f"{STATE_KEY}."))

        try:
            with participants.failing_together():
                contents = CheckpointContents(found.path, read_metadata(found.path), STATE_KEY)
                wanted = state.prepare_to_load(contents) if isinstance(state, PreparesToLoad) else state.state_dict()
            loaded = load_state(
                found.path,
                {STATE_KEY: wanted},
                self._checkpoints.group,
                metadata=contents.metadata,
                may_be_left=may_be_left,
            )
        except ValueError as error:
            allow = "If parameters were added or removed on purpose, set checkpointing.on_changed_parameters to 'allow'. Otherwise undo"
            mend = allow if self._config.on_changed_parameters == "raise" else "Undo"
            raise ValueError(
                f"{error}\n{mend} the change, start another run (run.name), or remove the checkpoint."
            ) from error
        with participants.failing_together():
            state.load_state_dict(loaded[STATE_KEY])
        told = participants.gather(tuple(state.told) if isinstance(state, PreparesToLoad) else ())
        self._last_step = found.step
        if self._dist_context.is_main_process:
            self._dist_context.logger.info("resumed from %s", found.path)
            for text in dict.fromkeys(text for of_rank in told for text in of_rank):
                self._dist_context.logger.warning("%s", text)
        return True
