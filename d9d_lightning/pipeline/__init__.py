"""Unchanged modules, cut into pipeline stages."""
