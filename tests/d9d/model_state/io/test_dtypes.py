"""Names of dtypes in files, against those that the safetensors library writes."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from d9d.model_state.io.dtypes import FILE_DTYPES


def test_the_names_are_those_of_the_library(tmp_path: Path):
    for name, dtype in FILE_DTYPES.items():
        save_file({"x": torch.zeros(1, dtype=dtype)}, tmp_path / name)
        content = (tmp_path / name).read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert header["x"]["dtype"] == name
    # All of this torch, but complex128 and those that are not whole bytes or only for computing.
    assert len(set(FILE_DTYPES.values())) == len(FILE_DTYPES) == 19
