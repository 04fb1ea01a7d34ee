"""What a model state holds, against the safetensors library; broken and hostile files; what comes out unread."""

import json
import os
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from d9d.model_state.io.source import examine_model_state, open_model_state
from d9d.model_state.mapper.pieces import Box

INDEX = "model.safetensors.index.json"


def write_shards(directory: Path, shards: dict[str, dict[str, torch.Tensor]]) -> dict[str, str]:
    """Write a sharded model state and return its weight map."""
    weight_map: dict[str, str] = {}
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
        weight_map.update(dict.fromkeys(tensors, file))
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


def write_raw(
    path: Path, header: bytes | str | dict[str, object], data: bytes = b"", length: int | None = None
) -> None:
    """Write a file of safetensors by hand: the length of the header, the header, the data."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


ALL_KINDS = {
    "float64": torch.arange(6, dtype=torch.float64).view(2, 3),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "bfloat16": torch.arange(7).bfloat16(),
    "float16": torch.arange(5).half(),
    "float8": torch.arange(5).to(torch.float8_e4m3fn),
    "float8_e5m2": torch.arange(5).to(torch.float8_e5m2),
    "bool": torch.tensor([True, False]),
    "int64": torch.tensor([2**40, -1]),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "complex64": torch.tensor([1 + 2j]),
    "a name.with \u00e4 dots.0.weight": torch.ones(1),
}


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)]
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(*as_bytes)


def test_one_file_holds_what_the_library_wrote(tmp_path: Path):
    save_file(ALL_KINDS, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with open_model_state(path) as source:
            assert set(source.tensors) == set(ALL_KINDS)
            for name, tensor in ALL_KINDS.items():
                info = source.tensors[name]
                assert (info.name, info.shape, info.dtype) == (name, tuple(tensor.shape), tensor.dtype)
                assert info.num_bytes == tensor.nbytes
                assert info.file == tmp_path / "model.safetensors"
                assert same_bits(source.read(name), tensor)
                assert same_bits(source.read(name, Box.whole(tensor.shape)), tensor)


def test_boxes_are_views_of_the_mapped_file(tmp_path: Path):
    tensor = torch.arange(120.0).view(4, 5, 6)
    save_file({"x": tensor}, tmp_path / "any.safetensors")
    with open_model_state(tmp_path) as source:
        part = source.read("x", Box((1, 2, 0), (2, 1, 6)))
        assert torch.equal(part, tensor[1:3, 2:3])
        assert source.read("x", Box((4, 0, 0), (0, 5, 6))).shape == (0, 5, 6)
        assert source.read("x", Box((1, 2, 0), (2, 1, 6))).data_ptr() == part.data_ptr()
        with pytest.raises(KeyError):
            source.read("y")
    with pytest.raises(RuntimeError, match="is closed"):
        source.read("x")
    assert torch.equal(part, tensor[1:3, 2:3]), "what is still used must stay mapped"


def test_shards_come_in_the_order_of_files_and_data(tmp_path: Path):
    shards = {"b.safetensors": {"m.0": torch.ones(2), "z": torch.ones(1)}, "a.safetensors": {"m.1": torch.ones(3)}}
    write_shards(tmp_path, shards)
    with open_model_state(tmp_path) as source:
        names = list(source.tensors)
        assert names[0] == "m.1"
        assert sorted(names) == ["m.0", "m.1", "z"]
    variant = tmp_path / "model.fp16.safetensors.index.json"
    variant.write_bytes((tmp_path / INDEX).read_bytes())
    with open_model_state(variant) as source:
        assert len(source.tensors) == 3


def test_many_tensors_open_in_no_time(tmp_path: Path):
    save_file({f"layers.{i}.weight": torch.zeros(2) for i in range(20_000)}, tmp_path / "model.safetensors")
    start = time.process_time()
    with open_model_state(tmp_path) as source:
        assert len(source.tensors) == 20_000
    # 0.3 s when nothing else runs
    assert time.process_time() - start < 2


def refused(path: Path, *fragments: str, cache_root: Path | None = None) -> str:
    """Check that a model state is refused, and that examining it says the same without raising."""
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the fragments are the match
        open_model_state(path, cache_root=cache_root)
    message = str(error.value)
    for fragment in fragments:
        assert fragment in message
    assert examine_model_state(path, cache_root=cache_root).problems
    return message


F32 = entry("F32", [2], 0, 8)
HOSTILE = {
    "a header of 2^63 bytes": ("{}", b"", 2**63),
    "a header past the end": ("{}", b"", 1000),
    "a header above the limit": ("{}", b"", 100_000_001),
    "overlapping tensors": ({"a": F32, "b": entry("F32", [2], 4, 12)}, b"\0" * 12, None),
    "a hole": ({"a": F32, "b": entry("F32", [2], 12, 20)}, b"\0" * 20, None),
    "a tensor past the end": ({"a": F32}, b"\0" * 4, None),
    "shape and size that differ": ({"a": entry("F32", [3], 0, 8)}, b"\0" * 8, None),
    "a shape that overflows": ({"a": entry("F32", [2**40, 2**40], 0, 8)}, b"\0" * 8, None),
    "a negative size": ({"a": entry("F32", [-2], 0, 8)}, b"\0" * 8, None),
    "trailing bytes": ({"a": F32}, b"\0" * 9, None),
    "an unknown dtype": ({"a": entry("F33", [2], 0, 8)}, b"\0" * 8, None),
    "no JSON": ("{nonsense", b"", None),
    "an empty file": (b"", b"", None),
    "metadata of numbers": ({"__metadata__": {"format": 1}, "a": F32}, b"\0" * 8, None),
    "a key twice": (f'{{"a": {json.dumps(F32)}, "a": {json.dumps(F32)}}}', b"\0" * 8, None),
    "deep nesting": ('{"a": ' + "[" * 100_000, b"", None),
    "offsets backwards": ({"a": entry("F32", [2], 8, 0)}, b"\0" * 8, None),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_by_name(tmp_path: Path, case: str):
    write_raw(tmp_path / "model.safetensors", *HOSTILE[case])
    refused(tmp_path, str(tmp_path / "model.safetensors"), "cannot be read")


def test_a_key_twice_in_a_header_is_named(tmp_path: Path):
    write_raw(tmp_path / "model.safetensors", *HOSTILE["a key twice"])
    refused(tmp_path, "a key occurs twice: 'a'")


def test_a_truncated_file_is_refused(tmp_path: Path):
    save_file({"x": torch.arange(1000.0)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for num_bytes in (0, 7, 8, 50, len(whole) // 2, len(whole) - 1):
        (tmp_path / "model.safetensors").write_bytes(whole[:num_bytes])
        refused(tmp_path, "model.safetensors cannot be read")


def test_a_dtype_that_torch_does_not_hold_is_named(tmp_path: Path):
    write_raw(tmp_path / "model.safetensors", {"a": entry("F4", [4], 0, 2)}, b"\0\0")
    refused(tmp_path, "F4", "'a'")


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/hostname",
        "a\\b.safetensors",
        "a\0b",
        "sub/x.safetensors",
        "..",
        ".",
        "",
        "C:x",
        "a//b",
        "\ud800",
        "x" * 300,
    ],
)
def test_names_of_files_that_an_index_may_not_have(tmp_path: Path, name: str):
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    for place in (tmp_path, root / "sub"):
        save_file({"x": torch.ones(1)}, place / "x.safetensors")
    write_index(root, {"x": name})
    refused(root, "The index of", repr(name))
    if name != "sub/x.safetensors":
        refused(root, repr(name), cache_root=tmp_path)


def test_folders_and_links_need_a_cache_root(tmp_path: Path):
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "main"
    (snapshot / "sub").mkdir(parents=True)
    blobs.mkdir()
    for digit in "12":
        save_file({f"w{digit}": torch.full((2,), float(digit))}, blobs / (digit * 40))
    (snapshot / "one.safetensors").symlink_to(Path("../../blobs") / ("1" * 40))
    (snapshot / "sub" / "two.safetensors").symlink_to(Path("../../../blobs") / ("2" * 40))
    write_index(blobs, {"w1": "one.safetensors", "w2": "sub/two.safetensors"})
    (blobs / INDEX).rename(blobs / ("3" * 40))
    (snapshot / INDEX).symlink_to(Path("../../blobs") / ("3" * 40))
    refused(snapshot, INDEX, "cache_root")
    refused(snapshot, "outside", cache_root=snapshot / "sub")
    with open_model_state(snapshot, cache_root=tmp_path / "cache") as source:
        assert source.read("w2").tolist() == [2.0, 2.0]
    outside = tmp_path / "outside.safetensors"
    save_file({"w1": torch.zeros(2)}, outside)
    (snapshot / "one.safetensors").unlink()
    (snapshot / "one.safetensors").symlink_to(outside)
    refused(snapshot, "one.safetensors", "outside", cache_root=tmp_path / "cache")


def test_a_single_file_that_links_out_of_its_folder(tmp_path: Path):
    (tmp_path / "root").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "w.safetensors")
    (tmp_path / "root" / "model.safetensors").symlink_to(tmp_path / "w.safetensors")
    refused(tmp_path / "root", "links to", "cache_root")
    refused(tmp_path / "root" / "model.safetensors", "links to", "cache_root")
    with open_model_state(tmp_path / "root", cache_root=tmp_path) as source:
        assert list(source.tensors) == ["w"]


def test_all_missing_shards_come_in_one_error(tmp_path: Path):
    weight_map = write_shards(tmp_path, {f"{i}.safetensors": {f"w{i}": torch.ones(1)} for i in range(4)})
    for missing in ("1.safetensors", "3.safetensors"):
        (tmp_path / missing).unlink()
    (tmp_path / "3.safetensors").symlink_to("nowhere")
    assert len(weight_map) == 4
    refused(tmp_path, "2 of 4 files", "'1.safetensors', '3.safetensors'")
    (tmp_path / "1.safetensors").mkdir()
    refused(tmp_path, "1.safetensors is not a file")
    (tmp_path / "0.safetensors").unlink()
    os.mkfifo(tmp_path / "0.safetensors")
    refused(tmp_path, "0.safetensors is not a file")
    found = examine_model_state(tmp_path)
    assert set(found.tensors) == {"w2"}, "what is there is shown all the same"


def test_a_key_in_two_files(tmp_path: Path):
    write_shards(
        tmp_path, {"a.safetensors": {"w": torch.ones(1), "u": torch.ones(1)}, "b.safetensors": {"w": torch.ones(1)}}
    )
    refused(tmp_path, "'w' is in two files", "a.safetensors and b.safetensors")


def test_an_index_that_the_files_do_not_fit(tmp_path: Path):
    weight_map = write_shards(
        tmp_path, {"a.safetensors": {"layer.weight": torch.ones(1)}, "b.safetensors": {"v": torch.ones(1)}}
    )
    write_index(tmp_path, {**weight_map, "layer.weigth": "a.safetensors"})
    refused(tmp_path, "a.safetensors does not hold", "'layer.weigth' (nearest: 'layer.weight')")
    write_index(tmp_path, {**weight_map, "v": "a.safetensors", "layer.weight": "b.safetensors"})
    refused(tmp_path, "names a.safetensors for 'v', which is in b.safetensors")


def test_keys_that_the_index_does_not_name_are_left_out(tmp_path: Path):
    write_shards(tmp_path, {"a.safetensors": {"w": torch.ones(1), "extra": torch.ones(1)}})
    write_index(tmp_path, {"w": "a.safetensors"})
    with open_model_state(tmp_path) as source:
        assert list(source.tensors) == ["w"]
    found = examine_model_state(tmp_path)
    assert not found.problems
    assert len(found.notes) == 1
    assert "'extra'" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("{nonsense", "cannot be read"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "weight_map"),
        ("{}", "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": ["a"]}', "weight_map"),
        ('{"weight_map": {"w": 3, "v": "model.safetensors"}}', "'w'"),
        ('{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}', "a key occurs twice: 'w'"),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "cannot be read"),
        (" " * (64 * 2**20 + 1), "more than"),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, text: str, fragment: str):
    save_file({"w": torch.ones(1)}, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(text, encoding="latin-1")
    refused(tmp_path, "index", fragment)


def test_directories_without_a_model_state(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no model state at"):
        open_model_state(tmp_path / "nothing")
    refused(tmp_path, "there is nothing")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "'config.json'")
    for name in ("a.safetensors", "b.safetensors"):
        save_file({name[0]: torch.ones(1)}, tmp_path / name)
    refused(tmp_path, "'a.safetensors', 'b.safetensors'", "Give the path")


def test_what_a_stopped_export_leaves_is_no_model_state(tmp_path: Path):
    save_file({"w": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    refused(tmp_path, "not complete")
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / ".tmp-rank0-shard-1.safetensors")
    refused(tmp_path, "export that was stopped", ".tmp-rank0")
    # Another file is not what was exported, and may be meant all the same.
    save_file({"w": torch.zeros(1)}, tmp_path / "adapter.safetensors")
    refused(tmp_path, "export that was stopped", ".tmp-rank0", "'adapter.safetensors'", "give the path of the file")
    with open_model_state(tmp_path / "adapter.safetensors") as source:
        assert source.read("w").tolist() == [0]
    (tmp_path / ".tmp-rank0-shard-1.safetensors").unlink()
    with open_model_state(tmp_path) as source:
        assert source.read("w").tolist() == [0]


def test_an_index_and_a_single_file_that_it_does_not_name(tmp_path: Path):
    write_shards(tmp_path, {"a.safetensors": {"w": torch.ones(1)}})
    save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
    refused(tmp_path, "holds both")
    write_index(tmp_path, {"w": "model.safetensors"})
    with open_model_state(tmp_path) as source:
        assert source.read("w").tolist() == [0.0]


class Payload:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (os.environ["D9D_TEST_VICTIM"],))


def test_pickles_are_refused_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tensors = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "pickle", "allow_bin=True")
    with open_model_state(tmp_path, allow_bin=True) as source:
        assert source.tensors["b"].dtype == torch.bfloat16
        assert torch.equal(source.read("w", Box((1, 0), (1, 2))), tensors["w"][1:2, :2])
    monkeypatch.setenv("D9D_TEST_VICTIM", str(tmp_path / "victim"))
    # torch's own switch must not turn the protection off
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save({"w": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read as plain tensors"):
        open_model_state(tmp_path, allow_bin=True)
    assert not (tmp_path / "victim").exists()
    torch.save({"w": torch.ones(2), "step": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="something else than plain tensors by name: 'step'"):
        open_model_state(tmp_path, allow_bin=True)


def test_sharded_pickles(tmp_path: Path):
    torch.save({"w": torch.ones(2)}, tmp_path / "a.bin")
    torch.save({"v": torch.zeros(2)}, tmp_path / "b.bin")
    index = {"weight_map": {"w": "a.bin", "v": "b.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    refused(tmp_path, "pickle")
    with open_model_state(tmp_path, allow_bin=True) as source:
        assert source.read("v").tolist() == [0.0, 0.0]


def test_a_manifest_that_does_not_fit(tmp_path: Path):
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    manifest = tmp_path / "model.sha256.json"
    manifest.write_text(json.dumps({"model.safetensors": "0" * 64}))
    with pytest.raises(ValueError, match=r"model\.safetensors has the digest"):
        open_model_state(tmp_path)
    open_model_state(tmp_path, verify=False).close()


def test_all_problems_come_in_one_error(tmp_path: Path):
    write_shards(tmp_path, {"a.safetensors": {"w": torch.ones(1)}, "b.safetensors": {"w": torch.ones(1)}})
    write_raw(tmp_path / "c.safetensors", "{nonsense")
    write_index(tmp_path, {"w": "a.safetensors", "x": "b.safetensors", "y": "c.safetensors"})
    message = refused(tmp_path, "for 3 reasons", "two files", "c.safetensors cannot be read", "does not hold")
    assert message.count("\n- ") == 3
