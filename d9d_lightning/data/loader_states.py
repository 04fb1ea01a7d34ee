"""Positions of loaders in checkpoints: those of all ranks, behind what was trained on, and restored in time.

[Note: loaders with a state]
Lightning saves the states of loaders as they are on rank 0, and gives them to all ranks. That is right for a state that is
the same everywhere, as that of `ElasticLoader`. All others are gathered over the data-parallel ranks, and each rank gets
its own back; their number must stay. Peers in other dimensions of the mesh read the same.
"""
# The states are in Lightning's loops
# pyright: reportPrivateUsage=false

import copy
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper, _DatasetSamplerWrapper
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import BatchSampler, DataLoader

from d9d.core.dist_context import DistributedContext
from d9d.core.dist_ops import all_gather_object
from d9d.dataset.pack_stream import has_rank_invariant_state
from d9d_lightning.data.batch_counters import num_trained

__all__ = ["RankStateLoader", "StatefulLoader", "draw_order_again", "gather_loader_states", "load_waiting_states"]

_RANKS_KEY = "data_parallel_ranks"


@runtime_checkable
class StatefulLoader(Protocol):
    """Describes a loader that can tell where it is, such as torchdata's ``StatefulDataLoader``."""

    def __iter__(self) -> Iterator[Any]:  # whatever it loads
        """Start a pass over the data, or go on with one."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a position at the next `iter()`."""
        ...


class RankStateLoader:
    """Shows a loader with a state to Lightning, with everything that it has, and keeps its position per rank.

    [Note: loaders that are read ahead]
    From a loader without a length Lightning reads one batch ahead, to know which one is the last (2.6.6), and after an
    exception any loader is a batch ahead. So states are noted before each batch is read, under the number of batches read
    until then, and the one to save is that of the number of batches that were trained on.

    Args:
        loader: The loader of this rank.
        trainer: Counts the batches.
        num_ranks: Number of data-parallel ranks.
        rank: Index of this rank among them.

    Raises:
        ValueError: The order of its samples would be another one after a resume.
    """

    def __init__(self, loader: StatefulLoader, trainer: Trainer, num_ranks: int, rank: int) -> None:
        _refuse_random_order(loader)
        self._loader = loader
        self._trainer = trainer
        self._num_ranks = num_ranks
        self._rank = rank
        self._states: dict[int, dict[str, Any]] = {}
        self._num_read = 0
        self._is_through = False

    # `Any`: Lightning and hooks look at samplers, datasets and the like.
    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if "_loader" not in vars(self):
            raise AttributeError(name)  # while it is being copied
        return getattr(self._loader, name)  # introspection: shows whatever the loader has

    def __len__(self) -> int:
        length = sized_len(self._loader)
        if length is None:
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return length

    @property
    def rank(self) -> int:
        """Data-parallel rank that the position belongs to."""
        return self._rank

    @property
    def loader(self) -> StatefulLoader:
        """The loader itself."""
        return self._loader

    def __iter__(self) -> Iterator[Any]:
        if not self._is_through:
            # Else a pass ends while the last batch of it is trained on, and another one may begin at once.
            self._num_read = num_trained(self._trainer)
        self._is_through = False
        self._states.clear()
        batches = iter(self._loader)
        while True:
            self._note_state()
            try:
                batch = next(batches)
            except StopIteration:
                # The end of a pass is another position than that behind its last batch.
                self._note_state()
                self._is_through = True
                return
            self._num_read += 1
            yield batch

    def _note_state(self) -> None:
        trained = num_trained(self._trainer)
        self._states = {number: state for number, state in self._states.items() if number >= trained}
        # The loader may go on writing into what it returned.
        self._states[self._num_read] = copy.deepcopy(self._loader.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the position of this rank, behind the last batch that was trained on."""
        state = self._states.get(num_trained(self._trainer))
        return self._loader.state_dict() if state is None else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to the saved position of this rank.

        Raises:
            ValueError: It was saved by another number of data-parallel ranks.
        """
        self._states.clear()
        self._is_through = False
        self._loader.load_state_dict(state_dict if has_rank_invariant_state(self._loader) else self._own(state_dict))

    def _own(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = state_dict.get(_RANKS_KEY, [state_dict])
        if len(states) != self._num_ranks:
            raise ValueError(
                f"the checkpoint has the position of a {type(self._loader).__name__} on {len(states)} data-parallel "
                f"{'rank' if len(states) == 1 else 'ranks'}, and there are {self._num_ranks} now: each of them reads other "
                f"samples, so nobody knows which ones are left. Resume on {len(states)}, or use elastic_dataloader, which "
                f"takes any number."
            )
        return states[self._rank]


def _refuse_random_order(loader: object) -> None:
    """Refuse a random sampler inside of Lightning's: the list of its samples is drawn once a pass, and no state has it."""
    if not isinstance(loader, DataLoader):
        return
    batches = loader.batch_sampler
    # A loader with a batch sampler of its own has another sampler only for show.
    sampler = batches.sampler if isinstance(batches, BatchSampler) else loader.sampler
    wrapped = sampler.dataset if isinstance(sampler, DistributedSamplerWrapper) else None
    inner = wrapped._sampler if isinstance(wrapped, _DatasetSamplerWrapper) else None
    if "Random" in type(inner).__name__:
        raise ValueError(
            f"the order of a {type(loader).__name__} would be drawn anew after a resume: Lightning has put its sampler around "
            f"a {type(inner).__name__}, whose position no checkpoint holds. Leave shuffle=False, since "
            f"Lightning's sampler shuffles training data, or use elastic_dataloader."
        )


# `Any`: what Lightning, its callbacks and the user's hooks have put there.
def gather_loader_states(checkpoint: dict[str, Any], module: LightningModule, context: DistributedContext) -> None:
    """Put the positions of all data-parallel ranks into a checkpoint. All ranks must call it; blocks the host.

    Args:
        checkpoint: What Lightning has dumped.
        module: The module whose trainer has dumped it; one without a trainer has no loaders.
        context: Ranks of the job.
    """
    if module._trainer is None:
        return
    combined = module._trainer.fit_loop._combined_loader
    loaders = [] if combined is None else combined.flattened
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    states: list[Any] = loop.get("combined_loader", [])
    stateful = [loader for loader in loaders if isinstance(loader, StatefulLoader)]
    own = {
        index: (loader.rank, states[index])
        for index, loader in enumerate(stateful[: len(states)])
        if isinstance(loader, RankStateLoader) and not has_rank_invariant_state(loader.loader)
    }
    if context.replica_group is None or not own:
        return
    everywhere = all_gather_object(own, context.replica_group)
    if len(everywhere) > 1:
        for index in own:
            by_rank = dict(each[index] for each in everywhere)
            states[index] = {_RANKS_KEY: [by_rank[rank] for rank in sorted(by_rank)]}


def load_waiting_states(trainer: Trainer) -> None:
    """Restore the positions of loaders that had been asked for before Lightning had read the checkpoint.

    A module that looks at ``trainer.estimated_stepping_batches`` has the loaders built early, and Lightning restores
    positions when it builds them (2.6.6). Call it before the first batch.
    """
    loop = trainer.fit_loop
    if loop.restarting and loop._combined_loader_states_to_load and loop._data_fetcher is not None:
        loop._load_combined_loader_states()
        iter(loop._data_fetcher)


def draw_order_again(trainer: Trainer) -> None:
    """Let loaders draw the order of an epoch that begins behind a checkpoint, where random numbers have been restored.

    Lightning has started the loaders before, and does not do so again for the first epoch (2.6.6). A loader with a state has
    its order in that, as has an epoch in the middle.
    """
    loop = trainer.fit_loop
    if loop.restarting or loop._combined_loader is None or loop._data_fetcher is None:
        return
    if all(type(loader) is DataLoader for loader in loop._combined_loader.flattened):
        iter(loop._data_fetcher)
