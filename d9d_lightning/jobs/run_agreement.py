"""What all ranks of a run of the Trainer must have in common, compared before they wait for each other."""

import dataclasses

import lightning
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping

from d9d.core.agreement import agree_on, name_of
from d9d.core.dist_context import DistributedContext
from d9d.core.participants import Participants
from d9d_lightning.options.strategy_options import StrategyOptions

__all__ = ["agree_on_run"]

_OF_SINGLE_RANKS = ("launcher",)
"""Options that ranks need not have in common."""


def agree_on_run(context: DistributedContext, trainer: Trainer, options: StrategyOptions) -> None:
    """Compare what is run, and the arguments of the strategy and the Trainer. All ranks must call it; blocks.

    Args:
        context: Ranks of the job.
        trainer: Is about to run.
        options: Of the strategy.

    Raises:
        ValueError: On all ranks, naming what differs.
    """
    callbacks = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]  # Lightning sets it elsewhere
    facts: dict[str, object] = {
        "run": None if trainer.state.fn is None else trainer.state.fn.value,
        "Trainer": _arguments(trainer),
        # Others may be there on one rank alone, and print.
        "callbacks": [each.state_key for each in callbacks if isinstance(each, Checkpoint | EarlyStopping)],
        "D9DStrategy": _options(options),
        "version": {"torch": torch.__version__, "lightning": lightning.__version__},
    }
    mend = "Start all ranks with the same code, the same arguments and the same environment."
    agree_on(Participants(context.groups[:1]), "what they run", facts, mend)


def _options(options: StrategyOptions) -> dict[str, object]:
    """Return the arguments of a strategy, by the names that users know, but for those that ranks need not have in common."""
    names = [field.name for field in dataclasses.fields(options)]
    values = {name: getattr(options, name) for name in names}  # introspection: a dataclass declares its fields
    states = values.pop("model_states")
    mappers = {"load_mapper": states.load_mapper, "export_mapper": states.export_mapper}
    return {
        **{name: value for name, value in values.items() if name not in _OF_SINGLE_RANKS},
        # Each machine may have a copy of its own.
        "source_checkpoint": states.source_checkpoint is not None,
        # What they do need not show in a text.
        **{name: None if mapper is None else name_of(mapper) for name, mapper in mappers.items()},
        "keep_initial": states.keep_initial,
        "load_mode": states.load_mode,
    }


def _arguments(trainer: Trainer) -> dict[str, object]:
    """Return the arguments of a Trainer that decide what its ranks do together.

    The limits of batches are set where a type checker does not look.
    """
    return {
        "max_epochs": trainer.max_epochs,
        "min_epochs": trainer.min_epochs,
        "max_steps": trainer.max_steps,
        "min_steps": trainer.min_steps,
        "limit_train_batches": trainer.limit_train_batches,
        "limit_val_batches": trainer.limit_val_batches,
        "limit_test_batches": trainer.limit_test_batches,
        "limit_predict_batches": trainer.limit_predict_batches,
        "overfit_batches": vars(trainer)["overfit_batches"],
        "val_check_interval": trainer.val_check_interval,
        "check_val_every_n_epoch": trainer.check_val_every_n_epoch,
        "num_sanity_val_steps": trainer.num_sanity_val_steps,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
        "precision": trainer.precision,
    }
