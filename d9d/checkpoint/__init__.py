"""Training checkpoints: written atomically over all ranks, verified when they are read."""

from d9d.checkpoint.digest import FileDigest
from d9d.checkpoint.documents import Document
from d9d.checkpoint.folder import CheckpointFolder, SavedCheckpoint
from d9d.checkpoint.load import OnCorrupt, find_checkpoint, load_state, read_metadata, verify_checkpoint
from d9d.checkpoint.record import CommitRecord
from d9d.checkpoint.save import CheckpointSaver

__all__ = [
    "CheckpointFolder",
    "CheckpointSaver",
    "CommitRecord",
    "Document",
    "FileDigest",
    "OnCorrupt",
    "SavedCheckpoint",
    "find_checkpoint",
    "load_state",
    "read_metadata",
    "verify_checkpoint",
]
