"""Checkpoints that do not depend on the mesh."""
