"""Streams of tensors written as model states, read back by the safetensors library."""

import hashlib
import io
import json
import resource
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from d9d.model_state.io.manifest import MANIFEST_NAME, verify_manifest
from d9d.model_state.io.source import open_model_state
from d9d.model_state.io.writer import (
    write_model_state_distributed,
    write_model_state_local,
    write_model_state_pipeline_parallel,
)
from d9d.model_state.mapper.base import ModelStateMapper, StateGroup
from d9d.model_state.mapper.compose import (
    ModelStateMapperParallel,
    ModelStateMapperSequential,
    ModelStateMapperShard,
)
from d9d.model_state.mapper.leaf import (
    ModelStateMapperConcatenateTensors,
    ModelStateMapperDrop,
    ModelStateMapperIdentity,
    ModelStateMapperRename,
)

INDEX = "model.safetensors.index.json"


class OneGroup(ModelStateMapper):
    """A mapper that does what a test wants."""

    def __init__(self, inputs: set[str], outputs: set[str], result: Mapping[str, torch.Tensor], optional: str = ""):
        self._group = StateGroup(frozenset(inputs), frozenset(outputs))
        self._result = result
        self._optional = optional

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        return frozenset([self._group])

    def optional_inputs(self) -> frozenset[str]:
        return frozenset([self._optional] if self._optional else [])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**self._result, **{f"got {name}": tensor for name, tensor in group.items()}}


def identity(*names: str) -> ModelStateMapper:
    return ModelStateMapperParallel([ModelStateMapperIdentity(name) for name in names])


def numbered(num_tensors: int, first: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of 24 bytes."""
    return {f"t{n}": torch.full((2, 3), n, dtype=torch.int32) for n in range(first, first + num_tensors)}


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def read_back(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors, after a check that index and files agree."""
    if not (directory / INDEX).exists():
        return load_file(directory / "model.safetensors")
    index = json.loads((directory / INDEX).read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        content = load_file(directory / file)
        assert all(index["weight_map"][name] == file for name in content)
        tensors.update(content)
    assert tensors.keys() == index["weight_map"].keys()
    assert index["metadata"] == {"total_size": sum(t.numel() * t.element_size() for t in tensors.values())}
    return tensors


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("limit_bytes", "num_files"),
    # 5 tensors of 24 bytes: one each; one each; 2 + 2 + 1; 4 + 1; all, just and easily.
    [(1, 5), (47, 5), (48, 3), (119, 2), (120, 1), (10**9, 1)],
)
def test_the_number_of_files(tmp_path: Path, limit_bytes: int, num_files: int):
    tensors = numbered(5)
    write_model_state_local(tmp_path, identity(*tensors), tensors.items(), limit_bytes / 1e9, show_progress=False)
    if num_files == 1:
        assert files_in(tmp_path) == ["model.safetensors"]
    else:
        shards = [f"model-{n:05d}-of-{num_files:05d}.safetensors" for n in range(1, num_files + 1)]
        assert files_in(tmp_path) == [*shards, INDEX]
        assert json.loads((tmp_path / INDEX).read_text())["metadata"] == {"total_size": 120}
    assert_same(read_back(tmp_path), tensors)
    with open_model_state(tmp_path) as source:
        assert source.tensors.keys() == tensors.keys()


def test_a_large_tensor_gets_a_file_for_itself(tmp_path: Path):
    tensors = {"small": torch.ones(1), "large": torch.ones(1000), "small too": torch.ones(1)}
    write_model_state_local(tmp_path, identity(*tensors), tensors.items(), 100 / 1e9, show_progress=False)
    assert json.loads((tmp_path / INDEX).read_text())["weight_map"] == {
        "small": "model-00001-of-00003.safetensors",
        "large": "model-00002-of-00003.safetensors",
        "small too": "model-00003-of-00003.safetensors",
    }
    assert_same(read_back(tmp_path), tensors)


def test_a_converted_export(tmp_path: Path):
    tensors = {"w": torch.tensor([0.1, 1.0]), "half": torch.ones(3, dtype=torch.bfloat16), "step": torch.tensor([7])}
    # As stored: 2 x 8 + 3 x 8 and 8 bytes, so that the limit is reached after two tensors.
    write_model_state_local(
        tmp_path, identity(*tensors), tensors.items(), 40 / 1e9, show_progress=False, dtype=torch.float64
    )
    assert_same(
        read_back(tmp_path), {"w": tensors["w"].double(), "half": torch.ones(3).double(), "step": tensors["step"]}
    )
    assert json.loads((tmp_path / INDEX).read_text())["metadata"] == {"total_size": 2 * 8 + 3 * 8 + 8}
    assert files_in(tmp_path)[0] == "model-00001-of-00002.safetensors"


def test_groups_are_written_and_let_go_as_they_come(tmp_path: Path):
    alive: list[weakref.ref[torch.Tensor]] = []
    most_alive = 0

    def state() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most_alive
        for layer in range(4):
            for part in "qkv":
                tensor = torch.full((2, 4), ord(part) + layer, dtype=torch.int64)
                alive.append(weakref.ref(tensor))
                most_alive = max(most_alive, sum(ref() is not None for ref in alive))
                yield f"{layer}.{part}", tensor
                del tensor
            # Two files have begun by then, of one group each.
            assert len(files_in(tmp_path)) >= layer

    fuse = [ModelStateMapperConcatenateTensors([f"{n}.{part}" for part in "qkv"], f"{n}.qkv", 0) for n in range(4)]
    write_model_state_local(tmp_path, ModelStateMapperParallel(fuse), state(), 1e-9, show_progress=False)
    assert most_alive == 3
    expected = {
        f"{n}.qkv": torch.cat([torch.full((2, 4), ord(part) + n, dtype=torch.int64) for part in "qkv"])
        for n in range(4)
    }
    assert_same(read_back(tmp_path), expected)


def test_what_the_mapper_does_not_want_is_skipped(tmp_path: Path):
    tensors = numbered(3)
    write_model_state_local(tmp_path, ModelStateMapperRename("t1", "renamed"), tensors.items(), show_progress=False)
    assert_same(read_back(tmp_path), {"renamed": tensors["t1"]})


def test_optional_inputs_may_come_late_or_not_at_all(tmp_path: Path):
    for names in (["a", "b", "more"], ["a"]):
        mapper = OneGroup({"a", "b"}, {f"got {name}" for name in names if name != "more"}, {}, optional="b")
        write_model_state_local(tmp_path, mapper, [(n, torch.ones(1)) for n in names], show_progress=False)
        assert_same(read_back(tmp_path), {f"got {name}": torch.ones(1) for name in names if name != "more"})


@pytest.mark.parametrize(
    "mapper",
    [
        ModelStateMapperParallel([identity("t0"), ModelStateMapperDrop(["t1", "absent"])]),
        ModelStateMapperSequential([ModelStateMapperDrop(["t1", "absent"]), ModelStateMapperIdentity("t0")]),
    ],
)
def test_what_is_dropped_need_not_be_there(tmp_path: Path, mapper: ModelStateMapper):
    for num_tensors in (2, 1):
        tensors = numbered(num_tensors)
        write_model_state_local(tmp_path, mapper, tensors.items(), show_progress=False)
        assert_same(read_back(tmp_path), {"t0": tensors["t0"]})


def test_of_nothing_nothing_is_made(tmp_path: Path):
    mapper = ModelStateMapperParallel([identity("t0"), OneGroup({"a"}, {"x"}, {"x": torch.ones(1)}, optional="a")])
    with pytest.raises(ValueError, match=r"1 of 2 groups of the mapper did not get all inputs\. Missing: 'a'"):
        write_model_state_local(tmp_path, mapper, numbered(1).items(), show_progress=False)


@pytest.mark.parametrize(
    ("mapper", "names", "message"),
    [
        (
            identity("a", "b.weight", "c"),
            ["a", "b.wieght"],
            r"2 of 3 groups .* 'b\.weight' \(nearest: 'b\.wieght'\), 'c'",
        ),
        (identity("a"), ["a", "a"], "'a' came twice"),
        (identity(), ["a"], "nothing to export"),
        (OneGroup({"a"}, {"x", "y"}, {}), ["a"], r"OneGroup returned 'got a' for .*; it has declared 'x', 'y'"),
        (OneGroup({"a"}, {"got a"}, {"x": torch.ones(1)}), ["a"], "OneGroup returned .*'x'.*; it has declared 'got a'"),
        (
            OneGroup({"a"}, {"got a", "x"}, {"x": torch.ones(1, dtype=torch.complex128)}),
            ["a"],
            "x has the dtype torch.complex128",
        ),
    ],
)
def test_streams_that_are_refused(tmp_path: Path, mapper: ModelStateMapper, names: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        write_model_state_local(tmp_path, mapper, [(name, torch.ones(1)) for name in names], show_progress=False)
    assert files_in(tmp_path) == []


def test_options_that_are_refused(tmp_path: Path):
    for shard_size_gb in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"shard_size_gb is {shard_size_gb}"):
            write_model_state_local(tmp_path, identity("a"), [], shard_size_gb)
    for dtype in (torch.int8, torch.complex64):
        with pytest.raises(ValueError, match=f"dtype is {dtype}; only floating-point"):
            write_model_state_local(tmp_path, identity("a"), [], dtype=dtype)


def test_scales_without_a_sign_are_stored_and_nothing_is_converted_to_them(tmp_path: Path):
    # Powers of two, from 2^-127 on.
    scales = torch.arange(254, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    write_model_state_local(tmp_path, identity("scales"), [("scales", scales)], show_progress=False)
    with open_model_state(tmp_path) as source:
        found = source.read("scales")
        assert found.dtype == torch.float8_e8m0fnu
        assert found.view(torch.uint8).tolist() == list(range(254))
    with pytest.raises(ValueError, match=r"dtype is torch\.float8_e8m0fnu, which has no negative numbers"):
        write_model_state_local(tmp_path, identity("a"), [], dtype=torch.float8_e8m0fnu)


def test_an_interrupted_export_can_be_repeated(tmp_path: Path):
    def state() -> Iterator[tuple[str, torch.Tensor]]:
        yield "t0", torch.ones(1)
        raise KeyboardInterrupt

    # The traceback, which a notebook keeps, holds on to the first export.
    with pytest.raises(KeyboardInterrupt) as caught:
        write_model_state_local(tmp_path, identity("t0", "t1"), state(), show_progress=False)
    assert files_in(tmp_path) == []
    write_model_state_local(tmp_path, identity("t0"), numbered(1).items(), show_progress=False)
    assert caught.tb is not None
    assert files_in(tmp_path) == ["model.safetensors"]


def test_an_error_of_the_state_is_raised_as_it_is(tmp_path: Path):
    def state() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        write_model_state_local(tmp_path, identity("a", "b"), state(), show_progress=False)
    assert files_in(tmp_path) == []


def test_older_weights_are_replaced_and_other_files_stay(tmp_path: Path):
    for name in ("config.json", "model-notes.txt", "adapter.safetensors"):
        (tmp_path / name).write_text("mine")
    (tmp_path / ".tmp-rank3-shard-7.safetensors").write_text("left by an export that was killed")
    others = ["adapter.safetensors", "config.json", "model-notes.txt"]
    for num_tensors, manifest in [(3, True), (1, False), (2, False), (1, True), (1, False), (4, False), (2, False)]:
        tensors = numbered(num_tensors, first=num_tensors)
        write_model_state_local(
            tmp_path, identity(*tensors), tensors.items(), 24 / 1e9, show_progress=False, manifest=manifest
        )
        assert_same(read_back(tmp_path), tensors)
        weights = [f"model-{n + 1:05d}-of-{num_tensors:05d}.safetensors" for n in range(num_tensors)] + [INDEX]
        expected = ["model.safetensors"] if num_tensors == 1 else weights
        assert files_in(tmp_path) == sorted([*others, *expected, *(["model.sha256.json"] if manifest else [])])


def test_a_manifest(tmp_path: Path):
    tensors = numbered(3)
    write_model_state_local(tmp_path, identity(*tensors), tensors.items(), 24 / 1e9, show_progress=False, manifest=True)
    shards = [f"model-{n}-of-00003.safetensors" for n in ("00001", "00002", "00003")]
    verify_manifest(tmp_path, shards)
    digests = json.loads((tmp_path / MANIFEST_NAME).read_text())
    # The index too: it says which tensor is where.
    assert digests == {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in [*shards, INDEX]}
    index = (tmp_path / INDEX).read_text()
    (tmp_path / INDEX).write_text(index.replace('"total_size": 72', '"total_size": 73'))
    with pytest.raises(ValueError, match=r"1 of 4 files .*: model\.safetensors\.index\.json has the digest"):
        open_model_state(tmp_path)
    (tmp_path / INDEX).write_text(index)
    content = bytearray((tmp_path / shards[1]).read_bytes())
    content[-1] ^= 128
    (tmp_path / shards[1]).write_bytes(content)
    with pytest.raises(ValueError, match="model-00002-of-00003"):
        open_model_state(tmp_path)


def test_a_directory_that_cannot_be(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"exists: .*file'"):
        write_model_state_local(tmp_path / "file", identity("a"), [("a", torch.ones(1))], show_progress=False)


def test_a_full_disk_leaves_the_older_weights(tmp_path: Path):
    tensors = numbered(1)
    write_model_state_local(tmp_path, identity(*tensors), tensors.items(), show_progress=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(OSError, match=r"File too large: .*\.tmp-rank0-shard-1-\w+\.safetensors'"):
            write_model_state_local(
                tmp_path,
                identity("a", "b"),
                [("a", torch.ones(100)), ("b", torch.ones(9000))],
                4e-7,
                show_progress=False,
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files_in(tmp_path) == ["model.safetensors"]
    assert_same(read_back(tmp_path), tensors)


def first_ranks(num_ranks: int) -> dist.ProcessGroup | None:
    """A group of the first ranks, where this is one of them. A collective of all."""
    group = dist.new_group(range(num_ranks))
    return group if dist.get_rank() < num_ranks and isinstance(group, dist.ProcessGroup) else None


@pytest.mark.world_size(4)
def test_ranks_write_their_parts(tmp_path: Path):
    rank, group = dist.get_rank(), first_ranks(3)
    if group is None:
        return
    tensors = numbered(7)
    mapper = ModelStateMapperShard(identity(*tensors), 3, rank)
    # Any limit: each rank has a file of its own. The smaller one: two tensors in a file, of a rank's two or three.
    for limit_gb, most_in_file in ((1.0, 3), (48 / 1e9, 2)):
        write_model_state_distributed(tmp_path, mapper, tensors.items(), group, limit_gb, show_progress=False)
        assert_same(read_back(tmp_path), tensors)
        per_file = [len(load_file(path)) for path in tmp_path.glob("*.safetensors")]
        assert max(per_file) == most_in_file
        assert len(per_file) == {3: 3, 2: 4}[most_in_file]
        dist.barrier(group)


@pytest.mark.world_size(2)
def test_one_rank_may_have_nothing(tmp_path: Path):
    group = dist.group.WORLD
    assert group is not None
    mapper = identity("t0") if dist.get_rank() == 1 else identity()
    write_model_state_distributed(tmp_path, mapper, numbered(1).items(), group, show_progress=False)
    assert files_in(tmp_path) == ["model.safetensors"]


@pytest.mark.world_size(4)
def test_errors_reach_all_ranks(tmp_path: Path):
    rank, group = dist.get_rank(), first_ranks(3)
    if group is None:
        return

    def write(mapper: ModelStateMapper, names: list[str], shard_size_gb: float = 4.0) -> None:
        state = [(name, torch.ones(1)) for name in names]
        write_model_state_distributed(tmp_path, mapper, state, group, shard_size_gb, show_progress=False)

    own = f"rank {rank}"
    with pytest.raises(ValueError, match=r"1 tensors were written by more than one of the ranks 0, 2: 'same'"):
        write(identity("other" if rank == 1 else "same"), ["same", "other"])
    with pytest.raises(ValueError, match=r"on rank 1 of 3: 1 of 1 groups .* Missing: 'rank 1' \(nearest: 'rank 0'\)"):
        write(identity(own), ["rank 0" if rank == 1 else own])
    with pytest.raises(ValueError, match=r"on ranks 0, 2 of 3: shard_size_gb is -1"):
        write(identity(own), [own], 4.0 if rank == 1 else -1)
    with pytest.raises(RuntimeError, match=r"on rank 2 of 3: KeyError: 'missing'"):
        write(FailingMapper(own, fails=rank == 2), [own])
    with pytest.raises(ValueError, match=r"on rank 1 of 3: the mapper reads 'a' in two groups"):
        write(OverlappingMapper() if rank == 1 else identity(own), [own])
    with pytest.raises(ValueError, match="nothing to export"):
        write(identity(), [own])
    dist.barrier(group)
    assert files_in(tmp_path) == []


class FailingMapper(OneGroup):
    def __init__(self, name: str, *, fails: bool):
        super().__init__({name}, {f"got {name}"}, {})
        self._fails = fails

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self._fails:
            raise KeyError("missing")
        return super().apply(group)


class OverlappingMapper(ModelStateMapper):
    def state_dependency_groups(self) -> frozenset[StateGroup]:
        return frozenset(StateGroup(frozenset("a"), frozenset([name])) for name in "bc")

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {}


@pytest.mark.world_size(2)
def test_a_rank_that_cannot_write_goes_on_gathering(tmp_path: Path):
    """The state gathers as it goes: the other rank would wait for ever for one that has left."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    mesh = init_device_mesh("cpu", (2,))
    names = [f"{n}" for n in range(6)]

    def state() -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, distribute_tensor(torch.arange(9000.0), mesh, [Shard(0)]).full_tensor()

    mapper = ModelStateMapperShard(identity(*names), 2, rank)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192 if rank == 1 else soft, hard))
    try:
        with pytest.raises(OSError, match=r"on rank 1 of 2: .*File too large: .*\.tmp-rank1-shard-0-\w+\.safetensors'"):
            write_model_state_distributed(tmp_path, mapper, state(), group, show_progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    assert files_in(tmp_path) == []


@pytest.mark.world_size(1)
def test_a_dtensor_is_not_taken_for_the_whole(tmp_path: Path):
    tensor = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Shard(0)])
    with pytest.raises(ValueError, match="a is a DTensor, of which this rank has only a part"):
        write_model_state_local(tmp_path, identity("a"), [("a", tensor)], show_progress=False)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("dims", [("pp", "dp"), ("dp", "pp")])
def test_the_first_pipeline_writes(tmp_path: Path, dims: tuple[str, str]):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=dims)
    stage = mesh.get_local_rank("pp")
    replica = mesh.get_local_rank("dp")
    # What replicas other than the first have is not written.
    state = {name: tensor + 100 * replica for name, tensor in numbered(3, first=3 * stage).items()}
    write_model_state_pipeline_parallel(
        tmp_path, identity(*state), state.items(), mesh, "pp", 48 / 1e9, show_progress=False
    )
    dist.barrier()
    assert_same(read_back(tmp_path), numbered(6))
    assert len(files_in(tmp_path)) == 2 * 2 + 1
    with pytest.raises(ValueError, match=r"the mesh has no dimension 'pipe'. It has "):
        write_model_state_pipeline_parallel(tmp_path, identity(*state), state.items(), mesh, "pipe")
    with pytest.raises(ValueError, match="'same'"):
        write_model_state_pipeline_parallel(
            tmp_path, identity("same"), [("same", torch.ones(1))], mesh, "pp", show_progress=False
        )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "show_progress", "is_shown"),
    [(Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)],
)
def test_progress_counts_groups_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, show_progress: bool, is_shown: bool
):
    monkeypatch.setattr("sys.stderr", stderr)
    write_model_state_local(tmp_path, identity("t0", "t1"), numbered(3).items(), show_progress=show_progress)
    assert ("2/2" in stderr.getvalue()) == is_shown
    assert is_shown or stderr.getvalue() == ""
