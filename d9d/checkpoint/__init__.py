"""Training checkpoints: written atomically over all ranks, verified when they are read."""

from d9d.checkpoint.documents import Document, check_document
from d9d.checkpoint.folder import CheckpointFolder, SavedCheckpoint
from d9d.checkpoint.load import (
    OnCorrupt,
    find_checkpoint,
    load_document,
    load_state,
    read_metadata,
    verify_checkpoint,
)
from d9d.checkpoint.record import CommitRecord, FileDigest
from d9d.checkpoint.save import CheckpointSaver
from d9d.checkpoint.single import CheckpointPath

__all__ = [
    "CheckpointFolder",
    "CheckpointPath",
    "CheckpointSaver",
    "CommitRecord",
    "Document",
    "FileDigest",
    "OnCorrupt",
    "SavedCheckpoint",
    "check_document",
    "find_checkpoint",
    "load_document",
    "load_state",
    "read_metadata",
    "verify_checkpoint",
]
