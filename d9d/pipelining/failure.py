"""What the ranks of a pipeline tell each other when one of them fails, so that none waits for it."""

import contextlib
from collections.abc import Generator

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]  # the store has no public name (torch 2.13)
)

from d9d.core.dist_context import DistributedContext
from d9d.core.failures.report import JobFailedError, described
from d9d.pipelining.actions import ActionBase
from d9d.pipelining.p2p import PeerLostError, close_group

__all__ = ["FailureBoard", "PipelineActionError", "PipelinePeerError", "naming_failed_peers"]


class PipelineActionError(RuntimeError):
    """An action has failed on this rank, mostly in code of the model or the task: see its `__cause__`."""


class PipelinePeerError(JobFailedError):
    """Another rank of the pipeline has failed; the message says where and why."""


@contextlib.contextmanager
def naming_failed_peers(dist_context: DistributedContext) -> Generator[None]:
    """Raise the failure of another pipeline rank instead of what a collective of the block makes of it.

    A rank that is through with its program does not hear of a failure that comes later. It gets to a collective of the
    job, which fails when the other process ends.

    Raises:
        PipelinePeerError: If another rank of the pipeline has reported a failure.
    """
    try:
        yield
    except (PipelineActionError, PipelinePeerError):
        raise
    except RuntimeError as error:
        if not dist_context.mesh_params.has_pipeline_parallel:
            raise
        store, key = _get_default_store(), _key(dist_context.pipeline_group)
        if not store.check([key]):
            raise
        raise PipelinePeerError(f"a collective failed, because {store.get(key).decode()}") from error


def _key(group: dist.ProcessGroup) -> str:
    return f"d9d/pipeline/{group.group_name}/failure"


class FailureBoard:
    """Keeps the first failure in the store of the job, and ends the transfers of all ranks."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Take the group that belongs to the pipeline alone."""
        self._group = group
        self._device = device
        self._key = _key(group)

    def report(self, action: ActionBase, cause: Exception) -> RuntimeError:
        """Let the other ranks know of a failed action, and return the error to raise here.

        Peers that wait for this rank, or for one that waits for it, fail at once with the text of the first failure.
        """
        if isinstance(cause, PeerLostError):
            return self.peer_error(str(action), cause)
        text = f"action {action} failed on {self._here} ({_place(action)}): {described(cause)}"
        self._store_and_close(text)
        return PipelineActionError(text)

    def report_interruption(self, action: ActionBase, cause: BaseException) -> None:
        """Let the other ranks know that this one leaves without an error of its own, such as by Ctrl-C."""
        self._store_and_close(f"{self._here} was interrupted at {action}: {described(cause)}")

    @property
    def _here(self) -> str:
        return f"pipeline rank {self._group.rank()} (rank {dist.get_rank()} of the job)"

    def peer_error(self, place: str, cause: Exception) -> PipelinePeerError:
        """Return the error to raise on this rank after another one has failed.

        Args:
            place: Where this rank has noticed.
            cause: How.
        """
        store = _get_default_store()
        if store.check([self._key]):
            reason = store.get(self._key).decode()
        else:
            reason = (
                f"another rank of the pipeline is gone without an account: it was killed, or failed outside of the "
                f"step, see its log ({cause})"
            )
        close_group(self._group, self._device)
        return PipelinePeerError(f"{self._here} stopped at {place}, because {reason}")

    def _store_and_close(self, text: str) -> None:
        # The job is failing as it is: what goes wrong here must not hide why.
        with contextlib.suppress(RuntimeError):
            store = _get_default_store()
            if not store.check([self._key]):
                store.set(self._key, text)
            close_group(self._group, self._device)


def _place(action: ActionBase) -> str:
    match action:
        case ActionBase(stage_idx=int(stage), microbatch_idx=int(microbatch)):  # pyright: ignore[reportAttributeAccessIssue]  # actions of this package have them
            return f"stage {stage}, microbatch {microbatch}"
        case _:
            return str(action)
