"""Files written as a stream, read back by the safetensors library."""

import json
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from d9d.model_state.io.shard_file import HEADER_FRAME_BYTES, ShardFile, converted, expected_entry_bytes

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]
MIB = 2**20


def write(path: Path, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
    file = ShardFile(path, sum(expected_entry_bytes(name) for name in tensors) + HEADER_FRAME_BYTES)
    for name, tensor in tensors.items():
        assert file.has_room_for(name, tensor, dtype)
        file.add(name, tensor, dtype)
    file.close()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor in order, as the format wants them."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_size_of_the_file(tmp_path: Path):
    for n, tensors in enumerate(
        [{}, {"a": torch.ones(3, dtype=torch.uint8)}, {"a": torch.ones(5), "b": torch.ones(4)}]
    ):
        file = ShardFile(tmp_path / str(n), 1000)
        for name, tensor in tensors.items():
            file.add(name, tensor)
        file.close()
        # Of the length of the header, the header, and the tensors.
        assert file.num_file_bytes == (tmp_path / str(n)).stat().st_size == 8 + 1000 + [0, 3, 36][n]


def header_of(path: Path) -> tuple[int, dict[str, Any]]:
    content = path.read_bytes()
    num_bytes = int.from_bytes(content[:8], "little")
    return num_bytes, json.loads(content[8 : 8 + num_bytes])


def assert_equal_on_disk(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype), name
        assert raw_bytes(found[name]) == raw_bytes(tensor), name


def assert_without_holes(path: Path) -> None:
    num_header_bytes, header = header_of(path)
    assert header.pop("__metadata__") == {"format": "pt"}
    spans = sorted(tuple(entry["data_offsets"]) for entry in header.values())
    ends = [0, *(end for _, end in spans)]
    assert [start for start, _ in spans] == ends[:-1]
    assert path.stat().st_size == 8 + num_header_bytes + ends[-1]


def bits(dtype: torch.dtype, num_elements: int) -> torch.Tensor:
    """Elements of which every byte is another small number."""
    if dtype == torch.bool:
        return torch.arange(num_elements) % 2 == 1
    return torch.arange(num_elements * dtype.itemsize, dtype=torch.uint8).view(dtype)


def test_every_dtype_and_shape(tmp_path: Path):
    tensors: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        tensors[f"{dtype}.row"] = bits(dtype, 7)
        tensors[f"{dtype}.scalar"] = bits(dtype, 1).reshape(())
        tensors[f"{dtype}.empty"] = bits(dtype, 0).reshape(0, 3)
        tensors[f"{dtype}.matrix"] = bits(dtype, 12).reshape(3, 4)
        tensors[f"{dtype}.transposed"] = bits(dtype, 12).reshape(3, 4).T
    write(tmp_path / "x.safetensors", tensors)
    assert_equal_on_disk(tmp_path / "x.safetensors", tensors)
    assert_without_holes(tmp_path / "x.safetensors")


def test_tensors_start_at_a_multiple_of_their_element_size(tmp_path: Path):
    tensors = {
        "a": bits(torch.float8_e4m3fn, 3),
        "b": bits(torch.float64, 2),
        "c": bits(torch.bfloat16, 5),
        "d": bits(torch.float32, 1),
        "e": bits(torch.int8, 1),
        "f": bits(torch.int64, 1),
        "g": bits(torch.bool, 2),
        "h": bits(torch.float32, 3),
    }
    path = tmp_path / "x.safetensors"
    write(path, tensors)
    assert_equal_on_disk(path, tensors)
    assert_without_holes(path)
    num_header_bytes, header = header_of(path)
    assert (8 + num_header_bytes) % 8 == 0
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.dtype.itemsize == 0, name


def test_after_a_large_odd_tensor_wider_ones_belong_into_another_file(tmp_path: Path):
    tensors = {
        "waits": bits(torch.float32, 1),
        "waits too": bits(torch.int8, 3),
        "large": torch.arange(8 * MIB + 1, dtype=torch.int32).to(torch.int16),  # 16 MiB and 2 bytes
        "narrow": bits(torch.bfloat16, 3),
    }
    path = tmp_path / "x.safetensors"
    file = ShardFile(path, 4096)
    for name, tensor in tensors.items():
        assert file.has_room_for(name, tensor)
        file.add(name, tensor)
    assert not file.has_room_for("wide", bits(torch.float32, 1))
    # As it would be stored, it is narrow enough.
    assert file.has_room_for("converted", bits(torch.float32, 1), torch.float16)
    assert file.num_bytes == 4 + 3 + 16 * MIB + 2 + 6
    file.close()
    assert_equal_on_disk(path, tensors)
    assert_without_holes(path)
    _, header = header_of(path)
    starts = {name: header[name]["data_offsets"][0] for name in tensors}
    # The wider one goes before the large one, the others wait for the end, the wider first.
    assert starts == {"waits": 0, "large": 4, "narrow": 4 + 16 * MIB + 2, "waits too": 4 + 16 * MIB + 2 + 6}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3000 * 3000, dtype=torch.int32).view(3000, 3000).T,  # 36 MB
        torch.arange(2 * 5 * MIB).view(-1, 2)[:, 0],  # 40 MiB in one dimension
        torch.arange(2 * 5 * MIB).view(1, -1, 2)[:, :, 1],
        torch.tensor(7, dtype=torch.int32).expand(5, 1, MIB),  # 20 MiB from one element
        torch.complex(torch.arange(3.0 * MIB), torch.ones(3 * MIB)).conj(),  # 24 MiB, conjugated when read
    ],
    ids=["transposed", "strided", "one row", "expanded", "conjugated"],
)
def test_large_tensors_that_are_not_contiguous(tmp_path: Path, tensor: torch.Tensor):
    write(tmp_path / "x.safetensors", {"x": tensor})
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], tensor)


def test_views_and_shared_storages_are_written_alone(tmp_path: Path):
    large = torch.arange(1_000_000.0)
    weight = torch.nn.Parameter(torch.ones(3, 2))
    tensors = {"slice": large[500_000:500_002], "weight": weight, "tied": weight, "part": weight[1], "real": weight.T}
    write(tmp_path / "x.safetensors", tensors)
    assert_equal_on_disk(tmp_path / "x.safetensors", tensors)
    num_header_bytes, _ = header_of(tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").stat().st_size == 8 + num_header_bytes + 4 * (2 + 6 + 6 + 2 + 6)
    assert num_header_bytes < 4096


def test_a_tensor_may_change_once_it_is_added(tmp_path: Path):
    # One waits for the end of the file, the other does not.
    tensors = {"waits": torch.ones(1), "written": torch.ones(2)}
    file = ShardFile(tmp_path / "x.safetensors", 4096)
    for name, tensor in tensors.items():
        file.add(name, tensor)
        tensor.zero_()
    file.close()
    assert_equal_on_disk(tmp_path / "x.safetensors", {"waits": torch.ones(1), "written": torch.ones(2)})


def test_names_are_kept(tmp_path: Path):
    names = ["", "a.b", 'quo"te\\', "ümlaut", "\n", "日本", "x" * 5000]
    tensors = {name: torch.tensor(float(index)) for index, name in enumerate(names)}
    write(tmp_path / "x.safetensors", tensors)
    assert_equal_on_disk(tmp_path / "x.safetensors", tensors)


def test_the_header_has_room_for_tensors_of_many_dimensions(tmp_path: Path):
    tensors = {"x": torch.zeros([0, *[12345678] * 2, *[1] * 61]), "y": torch.zeros(10**15, 0)}
    write(tmp_path / "x.safetensors", tensors)
    assert_equal_on_disk(tmp_path / "x.safetensors", tensors)


def test_a_full_header(tmp_path: Path):
    file = ShardFile(tmp_path / "x.safetensors", 300)
    tensors: dict[str, torch.Tensor] = {}
    while file.has_room_for(f"tensor {len(tensors)}", torch.ones(2)):
        name = f"tensor {len(tensors)}"
        tensors[name] = torch.ones(2)
        file.add(name, tensors[name])
    # {"__metadata__":{"format":"pt"}, takes 34 bytes, "tensor 0":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}, 63.
    assert 2 <= len(tensors) <= (300 - 34) // 63
    with pytest.raises(ValueError, match=r"no room for another\. Ask has_room_for\(\) first"):
        file.add("another", torch.ones(2))
    file.close()
    assert_equal_on_disk(tmp_path / "x.safetensors", tensors)


def test_the_metadata_that_transformers_asks_for(tmp_path: Path):
    write(tmp_path / "x.safetensors", {})
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_what_cannot_be_written(tmp_path: Path):
    file = ShardFile(tmp_path / "x.safetensors", 4096)
    file.add("there", torch.ones(1))
    cases = [
        ("there", torch.ones(1), "there is written a second time"),
        ("__metadata__", torch.ones(1), "cannot be called __metadata__"),
        ("x", torch.ones(1, device="meta"), "x is on the meta device"),
        ("x", torch.ones(2, 2).to_sparse(), r"x has the layout torch\.sparse_coo"),
        ("x", torch.ones(1, dtype=torch.complex128), r"x has the dtype torch\.complex128.*bool, uint8.*complex64"),
        ("x" * 9000, torch.ones(1), r"no room for x{80}\. .*the name is too long"),
    ]
    for name, tensor, message in cases:
        with pytest.raises(ValueError, match=message):
            file.add(name, tensor)
    file.close()
    assert_equal_on_disk(tmp_path / "x.safetensors", {"there": torch.ones(1)})


def test_only_floating_point_tensors_are_converted(tmp_path: Path):
    tensors = {
        "float32": torch.tensor([1.0, 2.5, -3.14159]),
        "float64": torch.tensor(0.1, dtype=torch.float64),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "int64": torch.tensor([2**62 + 1]),
        "bool": torch.tensor([True]),
        "complex": torch.tensor([1j]),
        "strided": torch.arange(6 * MIB, dtype=torch.float64).view(-1, 2)[:, 0] % 256,  # in chunks
    }
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        path = tmp_path / f"{dtype}.safetensors"
        write(path, tensors, dtype)
        assert_equal_on_disk(path, {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()})


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [
        (65536.0, torch.float32, torch.float16),
        (-65536.0, torch.bfloat16, torch.float16),
        (1e39, torch.float64, torch.float32),
        (449.0, torch.float16, torch.float8_e4m3fn),
        (57344.0, torch.float8_e5m2, torch.float8_e4m3fn),
        (-1.0, torch.float32, torch.float8_e8m0fnu),
    ],
)
def test_values_beyond_the_range_of_a_dtype_are_refused(value: float, source: torch.dtype, target: torch.dtype):
    tensor = torch.tensor([1.0, value], dtype=torch.float64).to(source)
    with pytest.raises(ValueError, match=rf"w has values beyond the range of {target}, which is"):
        converted("w", tensor, target)
    with pytest.raises(ValueError, match="beyond the range"):
        converted("w", torch.tensor([float("nan"), value], dtype=torch.float64).to(source), target)
    # Infinity and NaN were there before.
    converted("w", torch.tensor([1.0, float("nan")]).to(source) if target.itemsize == 1 else tensor / 0, target)


def test_the_largest_values_of_a_dtype_pass():
    assert converted("w", torch.tensor([65504.0, -65504.0]), torch.float16).tolist() == [65504.0, -65504.0]
    assert converted("w", torch.tensor([448.0, -448.0]), torch.float8_e4m3fn).float().tolist() == [448.0, -448.0]
    assert converted("w", torch.tensor([1e-30]), torch.float16).tolist() == [0.0]


def test_a_disk_that_is_full_is_named(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    file = ShardFile(path, 4096)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(OSError, match=rf"File too large: '{path}'"):
            file.add("x", torch.ones(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.abort()
    assert not path.exists()
    file.abort()


def test_nothing_is_overwritten(tmp_path: Path):
    (tmp_path / "x.safetensors").write_text("precious")
    with pytest.raises(FileExistsError, match=r"x\.safetensors"):
        ShardFile(tmp_path / "x.safetensors", 4096)
    assert (tmp_path / "x.safetensors").read_text() == "precious"
