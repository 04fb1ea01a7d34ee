"""Re-exports the halves of a backward pass."""

from d9d.pipelining.backward import stage_backward_full, stage_backward_input, stage_backward_weight

__all__ = ["stage_backward_full", "stage_backward_input", "stage_backward_weight"]
