"""Machinery of the training step that both front ends share."""
