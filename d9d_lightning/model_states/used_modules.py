"""Know which modules a run has used.

[Note: a module is loaded once]
A source checkpoint is what a module starts from. So it is loaded when the first run sets the module up, and never again:
`validate` after `fit`, or a second Trainer, must not undo the training. That a run has used a module is noted in the
module itself, since it may travel to other processes and back, or be copied with its trained weights.
"""

from torch import nn

__all__ = ["has_run", "note_run"]

_HAS_RUN = "_d9d_has_run"


def has_run(module: nn.Module) -> bool:
    """Tell whether a run has used a module. See [Note: a module is loaded once]."""
    return _HAS_RUN in vars(module)


def note_run(module: nn.Module) -> None:
    """Note that a run has used a module."""
    vars(module)[_HAS_RUN] = True
