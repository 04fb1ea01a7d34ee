"""Offline conversions, in this process and in workers, against tensors that the safetensors library reads and writes."""

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from d9d.model_state.convert import Conversion, ConversionResult, convert_model_state
from d9d.model_state.io.export_directory import lock_for_export

INDEX, MANIFEST = "model.safetensors.index.json", "model.sha256.json"

MAPPERS = """
import os
import signal
import threading

from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import (
    ModelStateMapperConcatenateTensors, ModelStateMapperChunkTensors, ModelStateMapperIdentity, ModelStateMapperRename
)

def fused():
    return ModelStateMapperParallel([
        *(
            ModelStateMapperConcatenateTensors([f"{layer}.q", f"{layer}.k", f"{layer}.v"], f"layers.{layer}.qkv", dim=0)
            for layer in range(4)
        ),
        ModelStateMapperRename("embed", "embedding.weight"),
    ])

def misspelt():
    return ModelStateMapperParallel([ModelStateMapperRename("embde", "a"), ModelStateMapperRename("0.z", "b")])

def uneven():
    return ModelStateMapperChunkTensors("embed", ["left", "right"], dim=0)

class Special(ModelStateMapper):
    def __init__(self, name, act):
        self.name, self.act = name, act
    def state_dependency_groups(self):
        return frozenset([StateGroup(inputs=frozenset([self.name]), outputs=frozenset([self.name]))])
    def apply(self, group):
        if not group[self.name].is_meta:  # as when it is tried without data
            self.act()
        return group

def special(act, names):
    others = [ModelStateMapperIdentity(name) for name in names if name != "embed"]
    return ModelStateMapperParallel([*others, Special("embed", act)])

def killing(names):
    return special(lambda: os.kill(os.getpid(), signal.SIGKILL), names)

def leaving(names):
    return special(lambda: os._exit(3), names)

def failing(names):
    return special(lambda: {}["hidden_size"], names)
"""


def source_tensors() -> dict[str, torch.Tensor]:
    tensors = {"embed": torch.arange(26.0).view(13, 2)}
    for layer in range(4):
        for offset, (name, rows) in enumerate({"q": 4, "k": 2, "v": 2}.items(), start=1):
            start = 100.0 * offset + layer
            tensors[f"{layer}.{name}"] = (start + torch.arange(rows * 3.0).view(rows, 3)).double()
    return tensors


@pytest.fixture
def src(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model state in two files, q of a layer in another one than k and v; and a module of mappers."""
    tensors = source_tensors()
    shards = {
        "model-00001-of-00002.safetensors": {name: value for name, value in tensors.items() if name.endswith("q")},
        "model-00002-of-00002.safetensors": {name: value for name, value in tensors.items() if not name.endswith("q")},
    }
    folder = tmp_path / "src"
    folder.mkdir()
    for name, shard in shards.items():
        save_file(shard, folder / name)
    weight_map = {key: name for name, shard in shards.items() for key in shard}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "convert_mappers.py").write_text(MAPPERS, encoding="utf-8")
    monkeypatch.syspath_prepend(modules)
    monkeypatch.delitem(sys.modules, "convert_mappers", raising=False)
    return folder


@pytest.fixture
def dest(tmp_path: Path) -> Path:
    return tmp_path / "dest"


def convert(src: Path, dest: Path, **options: object) -> ConversionResult:
    mapper = options.pop("mapper", None)
    reference = f"convert_mappers:{mapper}" if mapper else None
    return convert_model_state(Conversion(src_dir=src, dest_dir=dest, mapper=reference, **options), show_progress=False)


def read(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        assert not tensors.keys() & found.keys()
        found |= tensors
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(as_bytes(found[name]), as_bytes(tensor)), name


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    made = {
        f"layers.{layer}.qkv": torch.cat([tensors[f"{layer}.{name}"] for name in ("q", "k", "v")]) for layer in range(4)
    }
    return made | {"embedding.weight": tensors["embed"]}


def test_names_are_kept_without_a_mapper(src: Path, dest: Path):
    result = convert(src, dest)
    assert_same(read(dest), source_tensors())
    # 13 x 2 floats, and for each of 4 layers 8 rows of 3 doubles
    assert (result.num_tensors, result.num_files, result.num_bytes, result.unread) == (13, 1, 104 + 4 * 192, ())
    assert [path.name for path in dest.iterdir()] == ["model.safetensors"]


def test_files_keep_to_their_size(src: Path, dest: Path):
    # q takes 96 bytes, k and v 48 each, embed 104: no two of the four q fit into one file of 150 bytes.
    result = convert(src, dest, shard_size_gb=150e-9)
    assert_same(read(dest), source_tensors())
    sizes = [sum(tensor.nbytes for tensor in load_file(path).values()) for path in dest.glob("*.safetensors")]
    assert max(sizes) <= 150
    assert len(sizes) == result.num_files >= 872 / 150
    index = json.loads((dest / INDEX).read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == 872
    assert index["weight_map"].keys() == source_tensors().keys()


@pytest.mark.timeout_s(120)
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_mappers_are_applied(src: Path, dest: Path, num_workers: int):
    result = convert(src, dest, mapper="fused", num_workers=num_workers)
    assert_same(read(dest), fused(source_tensors()))
    assert result.num_tensors == 5
    assert not list(dest.glob(".tmp*"))


@pytest.mark.timeout_s(120)
def test_tensors_of_every_kind_in_more_workers_than_tensors(tmp_path: Path, dest: Path):
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty.weight": torch.empty(0, 3, dtype=torch.bfloat16),
        "a.b.c.d": torch.arange(6).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    convert(tmp_path / "model.safetensors", dest, num_workers=5)
    assert_same(read(dest), tensors)


def test_dtype(tmp_path: Path, dest: Path):
    third = torch.full((5,), 1 / 3)
    save_file({"a": third, "b": third.double(), "steps": torch.arange(3)}, tmp_path / "model.safetensors")
    result = convert(tmp_path / "model.safetensors", dest, dtype=torch.bfloat16)
    assert_same(read(dest), {"a": third.bfloat16(), "b": third.bfloat16(), "steps": torch.arange(3)})
    assert result.num_bytes == 2 * 5 * 2 + 3 * 8


@pytest.mark.timeout_s(120)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_numbers_beyond_a_dtype_are_refused(tmp_path: Path, dest: Path, num_workers: int):
    save_file({"fine": torch.ones(3), "large": torch.tensor([1.0, 7e4])}, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"was not completed(.|\n)*large"):
        convert(tmp_path / "model.safetensors", dest, dtype=torch.float16, num_workers=num_workers)
    assert_nothing_in(dest)


def test_what_is_not_read_is_told(src: Path, dest: Path):
    save_file({"embed": torch.ones(2), "a": torch.ones(1), "b": torch.ones(1)}, src.parent / "model.safetensors")
    (src.parent / "modules" / "only_embed.py").write_text(
        "from d9d.model_state.mapper.leaf import ModelStateMapperRename\n"
        "def mapper(): return ModelStateMapperRename('embed', 'embedding')\n",
        encoding="utf-8",
    )
    conversion = Conversion(src_dir=src.parent / "model.safetensors", dest_dir=dest, mapper="only_embed:mapper")
    result = convert_model_state(conversion, show_progress=False)
    assert result.unread == ("a", "b")
    assert str(result) == f"{dest}: 1 tensor, 8 B, in 1 file\nnot read from the source: 2 tensors: 'a', 'b'"


@pytest.mark.timeout_s(120)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_manifest_is_written(src: Path, dest: Path, num_workers: int):
    convert(src, dest, manifest=True, num_workers=num_workers, shard_size_gb=200e-9)
    manifest = json.loads((dest / MANIFEST).read_text(encoding="utf-8"))
    files = [*dest.glob("*.safetensors"), dest / INDEX]
    assert manifest == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_model_state_is_replaced_only_if_asked(src: Path, dest: Path):
    convert(src, dest, shard_size_gb=150e-9)
    before = {path: path.read_bytes() for path in dest.iterdir()}
    with pytest.raises(ValueError, match=r"dest holds a model state .*: name another folder, or overwrite it"):
        convert(src, dest, mapper="fused")
    assert {path: path.read_bytes() for path in dest.iterdir()} == before
    convert(src, dest, mapper="fused", overwrite=True)
    assert_same(read(dest), fused(source_tensors()))
    assert [path.name for path in dest.iterdir()] == ["model.safetensors"]


def test_what_a_stopped_export_has_left_does_not_matter(src: Path, dest: Path):
    dest.mkdir()
    (dest / ".tmp-rank0-shard-0-0123456789abcdef.safetensors").write_bytes(b"part")
    (dest / ".tmp-export.lock").write_text("process 1 on a machine that has been switched off")
    convert(src, dest)
    assert_same(read(dest), source_tensors())
    assert [path.name for path in dest.iterdir()] == ["model.safetensors"]


@pytest.mark.timeout_s(120)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_export_in_progress_is_not_disturbed(src: Path, dest: Path, num_workers: int):
    dest.mkdir()
    lock = lock_for_export(dest)
    shard = dest / ".tmp-rank0-shard-0-0123456789abcdef.safetensors"
    shard.write_bytes(b"part")
    with pytest.raises(RuntimeError, match=r"was not completed: .*another export into .*dest is in progress"):
        convert(src, dest, num_workers=num_workers)
    assert shard.read_bytes() == b"part"
    lock.release()
    convert(src, dest, num_workers=num_workers)
    assert_same(read(dest), source_tensors())


def test_the_source_is_not_overwritten(src: Path):
    before = {path: path.read_bytes() for path in src.iterdir()}
    for source in (src, src / "model-00001-of-00002.safetensors"):
        with pytest.raises(ValueError, match="is the source itself"):
            convert(source, src.parent / "x" / ".." / "src", overwrite=True)
    assert {path: path.read_bytes() for path in src.iterdir()} == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mapper": "misspelt"}, ["embde", "embed", "0.z"]),
        ({"mapper": "uneven"}, ["'embed' cannot be mapped to 'left', 'right'", "13"]),
        (
            {"mapper": "uneven", "num_workers": 0},
            ["workers (0) must be at least 1", "cannot be mapped to 'left', 'right'"],
        ),
        ({"shard_size_gb": 0.0}, ["the shard size (0.0 GB) must be above 0"]),
    ],
)
def test_mistakes_are_found_before_anything_is_written(
    src: Path, dest: Path, options: dict[str, object], words: list[str]
):
    with pytest.raises(ValueError, match=r"must be at|must be above|cannot be mapped|embde") as caught:
        convert(src, dest, **options)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not dest.exists()


def assert_nothing_in(dest: Path) -> None:
    assert not dest.exists() or not list(dest.iterdir())


@pytest.mark.timeout_s(120)
@pytest.mark.parametrize(
    ("mapper", "reason"),
    [
        ("killing", r"worker \d was killed by SIGKILL"),
        ("leaving", r"worker \d died with exit code 3"),
        ("failing", r"KeyError: 'hidden_size'"),
    ],
)
def test_a_worker_that_dies_ends_all(src: Path, dest: Path, mapper: str, reason: str):
    with pytest.raises(RuntimeError, match=rf"the conversion to .*dest was not completed: (.|\n)*{reason}"):
        convert(src, dest, mapper=mapper, num_workers=2)
    assert_nothing_in(dest)


def test_a_failure_in_this_process_is_one_sentence(src: Path, dest: Path):
    with pytest.raises(RuntimeError, match=r"was not completed: .*KeyError: 'hidden_size'"):
        convert(src, dest, mapper="failing")
    assert_nothing_in(dest)


@pytest.mark.timeout_s(120)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_file_of_pytorch_is_read_if_asked(src: Path, dest: Path, num_workers: int):
    folder = src.parent / "bin"
    folder.mkdir()
    torch.save(source_tensors(), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is in PyTorch's own format"):
        convert(folder, dest)
    convert(folder, dest, allow_bin=True, mapper="fused", num_workers=num_workers)
    assert_same(read(dest), fused(source_tensors()))


@pytest.mark.timeout_s(120)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_download_cache_is_read_if_it_is_named(src: Path, dest: Path, num_workers: int):
    snapshot = src.parent / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for path in src.iterdir():
        (snapshot / path.name).symlink_to(path)
    with pytest.raises(ValueError, match="cache_root"):
        convert(snapshot, dest)
    convert(snapshot, dest, cache_root=src.parent, mapper="fused", num_workers=num_workers)
    assert_same(read(dest), fused(source_tensors()))
