"""Hostile checkpoints run nothing."""

import io
import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from d9d.checkpoint import CheckpointFolder, CheckpointSaver, load_state, read_metadata
from d9d.checkpoint.safe_reader import MANIFEST_NAME
from d9d.core.participants import Participants


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def saved(folder: Path, state: dict[str, Any]) -> Path:
    CheckpointSaver(CheckpointFolder(folder, logging.getLogger("test")), Participants()).save(state, 1)
    return folder / "save-1"


def test_the_metadata_of_torch_is_never_read(tmp_path: Path):
    marker = tmp_path / "marker"
    path = saved(tmp_path, {"x": torch.ones(2)})
    (path / ".metadata").write_bytes(pickle.dumps(Hostile(marker)))
    assert load_state(path, {"x": torch.zeros(2)}, None)["x"].tolist() == [1.0, 1.0]
    assert not marker.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"entries":{"x":1},"places":[]}',
        b'{"entries":{"x":{"dtype":"Tensor","shape":[],"chunks":[]}},"places":[]}',
        b'{"entries":{"x":{"dtype":"int8","shape":["a"],"chunks":[]}},"places":[]}',
        b'{"entries":{},"places":[["x"]]}',
        b'{"entries":{},"places":[["x",null,"f",Infinity,1]]}',
    ],
)
def test_a_manifest_that_is_none(tmp_path: Path, content: bytes):
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(ValueError, match=r"does not tell what a checkpoint holds"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/hostname", "a/b", "a\\b", "..", ""])
def test_files_elsewhere(tmp_path: Path, name: str):
    content = {"entries": {"x": None}, "places": [["x", None, name, 0, 1, None]]}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="names a file outside"):
        read_metadata(tmp_path)


HOSTILE_VALUE = """
import sys, torch
from pathlib import Path
from d9d.checkpoint import load_state
for state in ({"task": {"seen": None}}, {"x": torch.zeros(2)}):
    try:
        load_state(Path(sys.argv[1]), state, None, may_be_left=lambda key: True)
    except Exception as error:
        assert "task.seen" in str(error) or "Weights only load failed" in str(error), error
    else:
        sys.exit("it was read")
"""


def test_values_that_are_pickles_are_refused_whatever_the_environment_says(tmp_path: Path):
    marker = tmp_path / "marker"
    path = saved(tmp_path, {"task": {"seen": 1}, "x": torch.ones(2)})
    pickled = io.BytesIO()
    torch.save(Hostile(marker), pickled)
    (path / "hostile").write_bytes(pickled.getvalue())
    manifest = json.loads((path / MANIFEST_NAME).read_bytes())
    manifest["places"] = [[*place[:2], "hostile", 0, len(pickled.getvalue()), None] for place in manifest["places"]]
    (path / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"task\.seen does not hold a value that was saved as JSON"):
        load_state(path, {"task": {"seen": None}}, None, may_be_left=lambda key: True)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load_state(path, {"x": torch.zeros(2)}, None, may_be_left=lambda key: True)
    environment = os.environ | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "PYTHONPATH": str(Path.cwd())}
    subprocess.run([sys.executable, "-c", HOSTILE_VALUE, str(path)], check=True, env=environment)
    assert not marker.exists()
