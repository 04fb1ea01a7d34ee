"""Gradients: sums, norms, clipping, loss scales and weights."""
