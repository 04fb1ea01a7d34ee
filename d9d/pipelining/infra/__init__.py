"""Pipelining under the import paths of earlier releases."""
