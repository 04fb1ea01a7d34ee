"""Training checkpoints: written atomically over all ranks, verified when they are read."""

from d9d.checkpoint.contents import CheckpointContents
from d9d.checkpoint.digest import FileDigest
from d9d.checkpoint.documents import Document, check_document
from d9d.checkpoint.folder import CheckpointFolder, SavedCheckpoint
from d9d.checkpoint.load import (
    OnChangedParameters,
    OnCorrupt,
    find_checkpoint,
    load_document,
    load_state,
    read_metadata,
    verify_checkpoint,
)
from d9d.checkpoint.record import CommitRecord
from d9d.checkpoint.save import CheckpointSaver
from d9d.checkpoint.single import CheckpointPath

__all__ = [
    "CheckpointContents",
    "CheckpointFolder",
    "CheckpointPath",
    "CheckpointSaver",
    "CommitRecord",
    "Document",
    "FileDigest",
    "OnChangedParameters",
    "OnCorrupt",
    "SavedCheckpoint",
    "check_document",
    "find_checkpoint",
    "load_document",
    "load_state",
    "read_metadata",
    "verify_checkpoint",
]
