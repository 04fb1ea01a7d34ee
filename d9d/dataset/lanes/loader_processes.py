"""How loader processes begin."""

import dataclasses
import os
from collections.abc import Callable

__all__ = ["OwnProcessGroup"]


@dataclasses.dataclass(frozen=True)
class OwnProcessGroup:
    """Puts a loader process of PyTorch into a process group of its own: the ``worker_init_fn`` of a loader.

    Launchers that tell a job to end signal the process group of each rank, as torchrun does (torch 2.13). The rank only notes
    that, and saves after its step; a loader process would end at once, and the rank then fails for want of data. Out of reach
    of such signals, loader processes end with their rank, which PyTorch sees to.

    Attributes:
        then: The ``worker_init_fn`` of the user, called after that.
    """

    then: Callable[[int], None] | None = None

    def __call__(self, worker_id: int) -> None:
        """Begin a loader process, in it."""
        os.setpgid(0, 0)
        if self.then is not None:
            self.then(worker_id)
