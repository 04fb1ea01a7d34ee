"""Know where the weights of a module come from.

[Note: a module is loaded once]
A source checkpoint is what training starts from. So a fit loads it into a module that was neither loaded nor trained before,
and no later run undoes the training: neither `validate` after `fit`, nor a second Trainer. A module that was trained without
the source is refused by a fit with it, as one of the two would be lost. An evaluation loads the source only where its
strategy has loaded none yet, so that a module with the weights of a checkpoint is evaluated as it is after a fit.

Where the weights come from is noted in the module itself, since it may travel to other processes and back, or be copied with
its trained weights. An evaluation without a source changes no weights, and notes nothing.
"""

from typing import Literal, TypeAlias

from torch import nn

__all__ = ["Origin", "note_origin", "origin_of"]

Origin: TypeAlias = Literal["loaded", "trained"]
"""From a source, and perhaps trained since; or from a fit without a source."""

_ORIGIN = "_d9d_origin"


def origin_of(module: nn.Module) -> Origin | None:
    """Return where the weights of a module come from; None if no run has loaded or trained them."""
    return vars(module).get(_ORIGIN)


def note_origin(module: nn.Module, origin: Origin) -> None:
    """Note where the weights of a module come from."""
    vars(module)[_ORIGIN] = origin
