"""Hostile checkpoints run nothing."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from d9d.checkpoint import load_state, read_metadata


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def as_metadata(content: Any, folder: Path) -> Path:
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    return folder


def test_metadata_that_asks_for_code(tmp_path: Path):
    marker = tmp_path / "marker"
    for index, content in enumerate((Hostile(marker), Metadata({}, planner_data=Hostile(marker)), eval, [torch.load])):
        with pytest.raises(ValueError, match=r"is not the metadata of a checkpoint"):
            read_metadata(as_metadata(content, tmp_path / str(index)))
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"x", b"\x80\x04.", pickle.dumps({}), pickle.dumps(Metadata({}))[:-3]])
def test_metadata_that_is_none(tmp_path: Path, content: bytes):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=r"is not the metadata of a checkpoint"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/hostname", "a/b"])
def test_files_elsewhere(tmp_path: Path, name: str):
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex

    content = Metadata({"x": BytesStorageMetadata()}, storage_data={MetadataIndex("x"): _StorageInfo(name, 0, 1)})
    with pytest.raises(ValueError, match="names a file outside"):
        read_metadata(as_metadata(content, tmp_path / "saved"))


HOSTILE_VALUE = """
import sys, torch, warnings
from pathlib import Path
from d9d.checkpoint import load_state
try:
    load_state(Path(sys.argv[1]), {"task": {"seen": None}}, None)
except ValueError as error:
    assert "task.seen" in str(error), error
else:
    sys.exit("it was read")
"""


def test_values_that_are_pickles_are_refused_whatever_the_environment_says(tmp_path: Path):
    """PyTorch pickles values that are no tensors; such a checkpoint is refused, not run."""
    marker = tmp_path / "marker"
    save({"task": {"seen": Hostile(marker)}}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(ValueError, match=r"task\.seen does not hold a value that was saved as JSON"):
        load_state(tmp_path / "saved", {"task": {"seen": None}}, None)
    environment = os.environ | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "PYTHONPATH": str(Path.cwd())}
    subprocess.run([sys.executable, "-c", HOSTILE_VALUE, str(tmp_path / "saved")], check=True, env=environment)
    assert not marker.exists()


def test_plain_metadata_of_torch_is_read(tmp_path: Path):
    tensors = {"x": torch.ones(3, dtype=torch.bfloat16), "y": {"z": torch.zeros(2, 2)}}
    save(tensors, checkpoint_id=tmp_path / "saved", no_dist=True)
    read = read_metadata(tmp_path / "saved")
    assert sorted(read.state_dict_metadata) == ["x", "y.z"]
