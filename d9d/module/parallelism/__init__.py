"""Distribute the submodules of a model over the meshes of a job."""
