"""A training loader whose steps hold the same samples on any number of ranks, and which resumes in constant time."""
# Lightning's loops keep how they read to themselves
# pyright: reportPrivateUsage=false

import dataclasses
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any, Literal, cast

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from torch.utils.data import default_collate

from d9d.core.types import CollateFn
from d9d.dataset.lanes import (
    BatchSchedule,
    DataPlan,
    ElasticMapStream,
    LaneState,
    LoaderOptions,
    MapDataset,
    RampPoint,
    StepRange,
    Tail,
    dataset_fingerprint,
)
from d9d.dataset.lanes.plan import divisors
from d9d.dataset.sharded import dataset_length
from d9d_lightning.data.batch_counters import convert_counters, num_trained

__all__ = ["ElasticLoader", "elastic_dataloader"]

_DONE_KEY = "batches_of_step"
_PER_STEP_KEY = "batches_per_step"


class ElasticLoader:
    """Loads the batches of one data-parallel rank for a Lightning Trainer; see `elastic_dataloader`.

    [Note: the position is Lightning's]
    Lightning counts the batches that were trained on, and goes back to the last complete one when a run is resumed. The
    position here is that count, read when a checkpoint is written or an epoch begins. So it is never ahead of what was
    trained on, whatever has been read before: not after an exception in the middle of a batch, and not when Lightning
    asks for the loader before it has restored its counters (``trainer.estimated_stepping_batches``). On another number of
    ranks a step may have another number of batches; Lightning's counters are then converted.

    Outside of a `D9DStrategy`, on one process, the position is behind the last batch that was handed out.
    """

    def __init__(
        self,
        dataset: MapDataset,
        collate_fn: CollateFn,
        plan: DataPlan,
        *,
        has_one_batch_per_step: bool,
        fingerprint: str | None = None,
        loading: LoaderOptions | None = None,
        seeds_generators: bool = True,
    ) -> None:
        """Take a plan, whose microbatches are the batches.

        Args:
            dataset: Map-style dataset.
            collate_fn: Makes a batch from samples.
            plan: Plan without an end, with one global batch size.
            has_one_batch_per_step: Whether each rank reads its part of a step as one batch, of whatever size.
            fingerprint: As for `elastic_dataloader`.
            loading: How to load.
            seeds_generators: As for `elastic_dataloader`.
        """
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._plan = plan
        self._has_one_batch_per_step = has_one_batch_per_step
        self._fingerprint = fingerprint
        self._loading = loading
        self._seeds_generators = seeds_generators
        self._trainer: Trainer | None = None
        self._stream: ElasticMapStream | None = None
        self._per_step = 0
        self._handed_out = 0
        self._next_position = -1
        self._iterator: Iterator[Any] | None = None  # under the name that Lightning clears when a run ends

    @property
    def _global_batch_size(self) -> int:
        return self._plan.schedule.global_batch_size(0)

    def _plan_for(self, num_ranks: int) -> DataPlan:
        if not self._has_one_batch_per_step:
            return self._plan
        size = self._global_batch_size
        if size % num_ranks:
            raise ValueError(
                f"global_batch_size ({size}) is not a multiple of the number of data-parallel ranks ({num_ranks}), each of "
                f"which reads an equal part of it as one batch. Use {', '.join(map(str, divisors(size)))} ranks."
            )
        return dataclasses.replace(self._plan, microbatch_size=size // num_ranks, num_lanes=num_ranks)

    def _agree_on_dataset(self, trainer: Trainer | None, num_samples: int) -> str:
        """Return the fingerprint as rank 0 sees it, and refuse datasets of other sizes on other ranks."""
        fingerprint, failure = self._fingerprint or "", ""
        if self._fingerprint is None and (trainer is None or trainer.is_global_zero):
            try:
                # Where loader processes read the samples, they are not opened here, see `dataset_fingerprint`.
                has_workers = self._loading is not None and self._loading.num_workers > 0
                fingerprint = dataset_fingerprint(self._dataset, in_process_of_its_own=has_workers)
            except Exception as error:
                if trainer is None:
                    raise
                failure = f"{type(error).__name__}: {error}"
        if trainer is None:
            return fingerprint
        fingerprint, of_first, failure = trainer.strategy.broadcast((fingerprint, num_samples, failure))
        if failure:
            raise RuntimeError(f"rank 0 could not take the fingerprint of the dataset: {failure}")
        if trainer.strategy.reduce_boolean_decision(num_samples != of_first, all=False):
            raise ValueError(
                f"ranks have datasets of different lengths: {num_samples} samples here and {of_first} on rank 0. Give all ranks "
                f"the same one; the loader gives each rank its share."
            )
        return fingerprint

    def join(self, trainer: Trainer | None, num_ranks: int, rank: int) -> None:
        """Load for a rank of a job from now on, from the position that the Trainer has. All ranks must call it.

        The strategy does, when a run begins. On rank 0 it loads a few samples for the fingerprint.

        Args:
            trainer: Counts the batches; None to count those that are handed out.
            num_ranks: Number of data-parallel ranks.
            rank: Index of this rank among them.

        Raises:
            ValueError: The batches cannot be dealt out to this number of ranks, or `overfit_batches` is set.
        """
        if trainer is not None and vars(trainer)["overfit_batches"] > 0:  # Lightning does not declare it
            raise ValueError(
                "overfit_batches repeats the same batches in each epoch, and the elastic loader goes on with others: give "
                "the Trainer an ordinary DataLoader for that."
            )
        plan = self._plan_for(num_ranks)
        self._fingerprint = self._agree_on_dataset(trainer, plan.num_samples)
        self._trainer = trainer
        self._iterator = None
        self._per_step = plan.num_microbatches(0, num_ranks)
        self._stream = ElasticMapStream(
            self._dataset,
            self._collate_fn,
            plan,
            dp_size=num_ranks,
            dp_rank=rank,
            loader=self._loading,
            fingerprint=self._fingerprint,
            seeds_generators=self._seeds_generators,
        )

    @property
    def _joined(self) -> ElasticMapStream:
        if self._stream is None:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                raise RuntimeError(
                    "an elastic loader does not know its rank: on several processes it needs a Trainer with a D9DStrategy, "
                    "or a call of join(None, num_ranks, rank)."
                )
            self.join(None, 1, 0)
        if self._stream is None:
            raise RuntimeError("the loader has not joined a job")
        return self._stream

    @property
    def has_rank_invariant_state(self) -> bool:
        """Tell that the state is the same on every rank."""
        return True

    def __len__(self) -> int:
        """Return the number of batches of an epoch on this rank: as many steps as fit into a pass over the data."""
        num_steps = max(1, self._joined.plan.num_samples // self._global_batch_size)
        return num_steps * self._per_step

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch from the current position on, which is looked at with the first of them."""
        first = self._position
        for offset in range(len(self)):
            yield self._load(first + offset)

    @property
    def _position(self) -> int:
        """Number of batches of this rank that were trained on. See [Note: the position is Lightning's]."""
        return self._handed_out if self._trainer is None else num_trained(self._trainer)

    def _load(self, position: int) -> Any:  # noqa: ANN401  # whatever the collate function returns
        if self._iterator is None or position != self._next_position:
            self._iterator = self._read_from(position)
        batch = next(self._iterator)
        self._next_position = self._handed_out = position + 1
        return batch

    def _read_from(self, position: int) -> Iterator[Any]:
        """Yield all batches from a position on, over the ends of epochs: loader processes go on reading there."""
        stream = self._joined
        step, num_done = divmod(position, self._per_step)
        stream.load_state_dict({**stream.state_dict(), **self._state_at(step)})
        for pack in stream:
            self._check_step()
            yield from pack[num_done:]
            num_done = 0

    def _state_at(self, num_steps: int) -> dict[str, Any]:
        return dict(LaneState.of(self._joined.plan, num_steps, self._fingerprint or "").to_dict())

    def _check_step(self) -> None:
        """Refuse what would make an optimizer step of other samples than the plan's."""
        trainer, per_step = self._trainer, self._per_step
        if trainer is None or not trainer.training:
            return
        if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise NotImplementedError(
                "an elastic loader cannot feed a training_step that takes dataloader_iter: Lightning does not count the "
                "batches that it reads."
            )
        if trainer.lightning_module.automatic_optimization and trainer.accumulate_grad_batches != per_step:
            raise ValueError(
                f"accumulate_grad_batches ({trainer.accumulate_grad_batches}) must be {per_step}: a step is "
                f"global_batch_size ({self._global_batch_size}) / {self._global_batch_size // per_step} samples of one batch "
                f"over all data-parallel ranks. Set Trainer(accumulate_grad_batches={per_step}), or leave batch_size out, "
                f"so that each step is one batch."
            )
        if trainer.num_training_batches % per_step:
            raise ValueError(
                f"limit_train_batches leaves {trainer.num_training_batches} batches per epoch, which do not make whole "
                f"steps of {per_step} batches. Use a multiple of {per_step}."
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch that was trained on; the same on all ranks, below 1 KiB."""
        stream = self._joined
        step, num_done = divmod(self._position, self._per_step)
        own = {_DONE_KEY: num_done, _PER_STEP_KEY: self._per_step}
        return {**stream.state_dict(), **self._state_at(step), **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Move to a saved position, and convert Lightning's counters to this number of ranks.

        Raises:
            ValueError: The position would mean other samples now, with each value that differs; or it is in the middle of a
                step, which has another number of batches now.
        """
        stream, per_step = self._joined, self._per_step
        num_done, saved_per_step = int(state_dict.get(_DONE_KEY, 0)), int(state_dict.get(_PER_STEP_KEY, per_step))
        if num_done and saved_per_step != per_step:
            raise ValueError(
                f"the checkpoint was written in the middle of an optimizer step, behind {num_done} of {saved_per_step} "
                f"batches of each rank, and a step has {per_step} now. Resume with the same global_batch_size, batch_size "
                f"and number of data-parallel ranks, or from a checkpoint between two steps."
            )
        stream.load_state_dict(state_dict)
        self._handed_out = LaneState.from_dict(state_dict).num_steps * per_step + num_done
        self._iterator = None
        if self._trainer is not None:
            convert_counters(self._trainer, self._handed_out, per_step, saved_per_step)


def elastic_dataloader(
    dataset: MapDataset,
    *,
    global_batch_size: int,
    batch_size: int | None = None,
    collate_fn: CollateFn | None = None,
    seed: int = 0,
    shuffle: bool = True,
    tail: Tail | Literal["drop", "wrap"] = Tail.drop,
    skip_steps: Sequence[StepRange] = (),
    fingerprint: str | None = None,
    loading: LoaderOptions | None = None,
    seeds_generators: bool = True,
) -> ElasticLoader:
    """Build a training loader whose optimizer steps are the same samples in the same order on any number of ranks.

    A checkpoint may be resumed at any step by any number of data-parallel ranks that can share the batches of a step, any
    number of loader processes and any other layout of the mesh. Give it to a Trainer with a `D9DStrategy` as any loader.

    Args:
        dataset: Map-style dataset; the same on every rank.
        global_batch_size: Samples of an optimizer step over all ranks.
        batch_size: Samples of one batch of a rank. ``accumulate_grad_batches`` must be as many as make a step, and the
            error for any other number has the right one. None: each rank's part of a step is one batch, whatever their
            number; ``D9DStrategy(microbatches=...)`` can cut it.
        collate_fn: Makes a batch from samples. None: PyTorch's default.
        seed: Seed of the shuffle, and of random numbers within samples.
        shuffle: Draw another order for each pass over the data.
        tail: What happens to samples that do not fill a last step: "drop" leaves them out, others in each pass; "wrap" goes
            on with them in the next epoch.
        skip_steps: Steps to jump over, such as those of a loss spike.
        fingerprint: Text that changes with the samples, compared at a resume. None: found from a few samples. Empty: none.
        loading: Loader processes, and how they load.
        seeds_generators: Whether to seed the global generators for each batch, so that what a dataset draws from them
            does not depend on workers. With a `batch_size` it does not depend on the number of ranks either.

    Raises:
        ValueError: The sizes do not fit together; names all problems.
        TypeError: The dataset has no length.
    """
    num_samples = dataset_length(dataset)
    sizes = {"global_batch_size": global_batch_size, "batch_size": batch_size}
    problems = [
        *(
            f"{name} ({size!r}) must be a whole number from 1 on."
            for name, size in sizes.items()
            if size is not None and not _is_size(size)
        ),
        *_problems_of_order(tail, skip_steps),
    ] or _problems_of_sizes(num_samples, global_batch_size, batch_size, Tail(tail))
    if problems:
        raise ValueError(" ".join(problems))
    plan = DataPlan(
        num_samples=num_samples,
        schedule=BatchSchedule(ramp=(RampPoint(0, global_batch_size),), skips=tuple(skip_steps)),
        microbatch_size=global_batch_size if batch_size is None else batch_size,
        seed=seed,
        shuffle=shuffle,
        tail=Tail(tail),
        num_epochs=None,
    )
    return ElasticLoader(
        dataset,
        collate_fn or cast("CollateFn", default_collate),
        plan,
        has_one_batch_per_step=batch_size is None,
        fingerprint=fingerprint,
        loading=loading,
        seeds_generators=seeds_generators,
    )


def _is_size(size: object) -> bool:
    return isinstance(size, Integral) and int(size) >= 1


def _problems_of_order(tail: str, skip_steps: Sequence[object]) -> list[str]:
    problems = [
        f"skip_steps ({skip!r}) must be a StepRange of zero-based steps, such as StepRange(100, 120)."
        for skip in skip_steps
        if not isinstance(skip, StepRange)
    ]
    if tail not in (Tail.drop, Tail.wrap):
        problems.append(
            f"tail ({str(tail)!r}) must be 'drop' or 'wrap': others give steps of other sizes or samples twice, which "
            "Lightning's loop would count as whole batches."
        )
    return problems


def _problems_of_sizes(num_samples: int, global_batch_size: int, batch_size: int | None, tail: Tail) -> list[str]:
    """Return what `DataPlan` would find, in the words of `elastic_dataloader`."""
    problems: list[str] = []
    if batch_size is not None and global_batch_size % batch_size:
        multiple = global_batch_size // batch_size * batch_size
        valid = " or ".join(str(size) for size in (multiple, multiple + batch_size) if size)
        problems.append(
            f"global_batch_size ({global_batch_size}) is not a multiple of batch_size ({batch_size}). Use {valid}."
        )
    if num_samples < 1:
        problems.append("the dataset has no samples.")
    elif tail is Tail.drop and num_samples < global_batch_size:
        problems.append(
            f"the dataset has {num_samples} samples, fewer than one global batch (global_batch_size {global_batch_size}): lower "
            "global_batch_size, or set tail to 'wrap'."
        )
    return problems
