"""Layouts against counts by hand, and against the safetensors library."""

import json

import pytest
import torch
from safetensors import deserialize

from d9d.model_state.io.file_layout import FileLayout, StoredTensor, lay_out


def stored(name: str, num_elements: int, dtype: torch.dtype = torch.float32) -> StoredTensor:
    return StoredTensor(name, (num_elements,), dtype)


def names_of(layouts: list[FileLayout]) -> list[str]:
    return ["".join(layout.tensors) for layout in layouts]


@pytest.mark.parametrize(
    ("limit_bytes", "expected"), [(100, ["abcd"]), (35, ["abc", "d"]), (24, ["ab", "cd"]), (1, ["ab", "c", "d"])]
)
def test_files_of_a_limited_size(limit_bytes: int, expected: list[str]):
    # 24, 0, 8 and 4 bytes
    tensors = [stored("a", 6), stored("b", 0), stored("c", 2), stored("d", 1)]
    assert names_of(lay_out(tensors, limit_bytes)) == expected


def test_no_tensors():
    assert lay_out([], 100) == []


def test_the_widest_come_first_so_that_all_are_aligned():
    tensors = [
        stored("a", 3, torch.uint8),
        stored("b", 1, torch.float64),
        stored("c", 3, torch.bfloat16),
        stored("d", 1),
    ]
    [layout] = lay_out(tensors, 1000)
    start = len(layout.header)
    assert start % 8 == 0
    assert layout.starts == {"b": start, "d": start + 8, "c": start + 12, "a": start + 18}
    assert layout.num_bytes == start + 21
    assert json.loads(layout.header[8:])["c"] == {"dtype": "BF16", "shape": [3], "data_offsets": [12, 18]}
    # The library refuses gaps and overlaps.
    found = dict(deserialize(layout.header + bytes(21)))
    assert {name: entry["shape"] for name, entry in found.items()} == {"a": [3], "b": [1], "c": [3], "d": [1]}
