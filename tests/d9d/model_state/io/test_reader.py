"""Model states that are streamed through mappers, against torch on what safetensors has written; and what is alive meanwhile."""

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from d9d.core.dist_ops import all_gather_object
from d9d.model_state.io.progress import progress_bar
from d9d.model_state.io.reader import order_groups, read_model_state, stream_groups
from d9d.model_state.io.source import ModelStateSource, TensorInfo
from d9d.model_state.mapper.base import ModelStateMapper, StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperParallel, ModelStateMapperSequential
from d9d.model_state.mapper.leaf import (
    ModelStateMapperChunkTensors,
    ModelStateMapperConcatenateTensors,
    ModelStateMapperDistribute,
    ModelStateMapperDrop,
    ModelStateMapperIdentity,
    ModelStateMapperRename,
    ModelStateMapperTie,
    ModelStateMapperTranspose,
)
from d9d.model_state.mapper.pieces import Box


def numbered(*shape: int, first: int = 0) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + first


def read(directory: Path, *mappers: ModelStateMapper, **options: object) -> Iterator[tuple[str, torch.Tensor]]:
    mapper = ModelStateMapperParallel(list(mappers))
    return iter(read_model_state(directory, mapper, "cpu", show_progress=False, **options))


def test_outputs_are_what_torch_makes(tmp_path: Path):
    stored = {
        "q": numbered(4, 3),
        "k": numbered(2, 3, first=100),
        "fused": numbered(6, 2, first=200),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "unused": torch.ones(7),
    }
    save_file(stored, tmp_path / "model.safetensors")
    found = dict(
        read(
            tmp_path,
            ModelStateMapperConcatenateTensors(["q", "k"], "qk", 0),
            ModelStateMapperChunkTensors("fused", ["a", "b", "c"], 0),
            ModelStateMapperRename("scalar", "scale"),
            ModelStateMapperIdentity("empty"),
        )
    )
    expected = {
        "qk": torch.cat([stored["q"], stored["k"]]),
        **dict(zip("abc", stored["fused"].chunk(3), strict=True)),
        "scale": stored["scalar"],
        "empty": stored["empty"],
    }
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_tensors_are_the_callers_own(tmp_path: Path):
    save_file({"x": numbered(4, 3), "y": numbered(2, 2)}, tmp_path / "model.safetensors")
    mappers = (ModelStateMapperChunkTensors("x", ["a", "b"], 0), ModelStateMapperTranspose("y", (0, 1)))
    for _ in range(2):
        found = dict(read(tmp_path, *mappers))
        assert torch.equal(found["a"], numbered(4, 3)[:2])
        assert torch.equal(found["y"], numbered(2, 2).t())
        for tensor in found.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert tensor.is_contiguous()
            tensor.zero_()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], numbered(4, 3))


def test_what_is_missing_is_named_before_anything_is_read(tmp_path: Path):
    save_file({"layer.weight": torch.ones(1), "x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"2 tensors are not in it: 'layer\.weigth' \(nearest: 'layer\.weight'\), 'zzz'\."
    ):
        read_model_state(
            tmp_path,
            ModelStateMapperConcatenateTensors(["x", "layer.weigth", "zzz"], "y", 0),
            "cpu",
            show_progress=False,
        )


def test_inputs_that_may_be_missing(tmp_path: Path):
    save_file({"embed": torch.ones(2)}, tmp_path / "model.safetensors")
    found = dict(
        read(tmp_path, ModelStateMapperTie(["embed", "head"], ["embed", "head"]), ModelStateMapperDrop(["rotary"]))
    )
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"embed": [1, 1], "head": [1, 1]}
    found["head"].zero_()
    assert found["embed"].tolist() == [1, 1]


def test_outputs_of_which_every_input_is_missing(tmp_path: Path):
    class Optional(ModelStateMapper):
        def state_dependency_groups(self) -> frozenset[StateGroup]:
            return frozenset([StateGroup(frozenset(["x", "y"]), frozenset(["z"]))])

        def optional_inputs(self) -> frozenset[str]:
            return frozenset(["x", "y"])

        def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"z": next(iter(group.values()))}

    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="2 tensors are not in it: 'x', 'y'"):
        read_model_state(tmp_path, Optional(), "cpu", show_progress=False)
    save_file({"y": torch.ones(2)}, tmp_path / "model.safetensors")
    assert [name for name, _ in read_model_state(tmp_path, Optional(), "cpu", show_progress=False)] == ["z"]


def test_what_is_dropped_need_not_be_there(tmp_path: Path):
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    for drop in (ModelStateMapperDrop(["gone"]), ModelStateMapperDrop(["gone", "lost"])):
        mapper = ModelStateMapperSequential([drop, ModelStateMapperIdentity("x")])
        found = read_model_state(tmp_path, mapper, "cpu", show_progress=False)
        assert {name: value.tolist() for name, value in found} == {"x": [1, 1]}


def test_a_mapper_that_fails_names_its_group(tmp_path: Path):
    class Failing(ModelStateMapper):
        def state_dependency_groups(self) -> frozenset[StateGroup]:
            return frozenset([StateGroup.of(["x"], ["y"])])

        def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"y": group["wieght"]}

    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(
        RuntimeError, match=r"'x' cannot be mapped to 'y': KeyError: 'wieght' \(.*test_reader\.py, line"
    ):
        list(read(tmp_path, Failing()))


class AliveSource(ModelStateSource):
    """Hands out tensors with memory of their own, and counts what of it is alive."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._stored = tensors
        self._tensors = {
            name: TensorInfo(name, Path("file"), tuple(tensor.shape), tensor.dtype, tensor.nbytes)
            for name, tensor in tensors.items()
        }
        self.read_names: list[str] = []
        self.num_alive_bytes = 0
        self.most_alive_bytes = 0
        self.is_closed = False

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        values = self._stored[name][() if box is None else box.slices].clone()
        self.read_names.append(name)
        self.num_alive_bytes += values.nbytes
        self.most_alive_bytes = max(self.most_alive_bytes, self.num_alive_bytes)
        weakref.finalize(values.untyped_storage(), self._forget, values.nbytes)
        return values

    def _forget(self, num_bytes: int) -> None:
        self.num_alive_bytes -= num_bytes

    def close(self) -> None:
        self.is_closed = True


def test_one_group_is_alive_at_a_time():
    # In the order of the files; 4 bytes each element. The groups have 4 * (10 + 30), 4 * 20 and 4 * (5 + 6) bytes.
    source = AliveSource(
        {
            "first": torch.ones(10),
            "unused": torch.ones(1000),
            "small.0": torch.ones(5),
            "single": torch.ones(20),
            "second": torch.ones(30),
            "small.1": torch.ones(6),
        }
    )
    mapper = ModelStateMapperParallel(
        [
            ModelStateMapperConcatenateTensors(["first", "second"], "large", 0),
            ModelStateMapperIdentity("single"),
            ModelStateMapperConcatenateTensors(["small.1", "small.0"], "small", 0),
        ]
    )
    groups = order_groups(mapper.state_dependency_groups(), source.tensors)
    assert [group.num_bytes for group in groups] == [80, 160, 44]
    names: list[str] = []
    stream = stream_groups(source, mapper, groups, torch.device("cpu"), progress_bar(0, "B", "reading", False))
    for name, tensor in stream:
        names.append(name)
        assert source.num_alive_bytes == 0, "what the mapper has joined is not needed any more"
        del tensor
    assert names == ["single", "large", "small"], "each when its last input comes up"
    assert source.read_names == ["single", "first", "second", "small.0", "small.1"]
    assert source.most_alive_bytes == 4 * (10 + 30)
    assert source.is_closed


def test_a_reader_that_is_left_early_lets_go_of_the_source():
    source = AliveSource({"a": torch.ones(1), "b": torch.ones(1)})
    mapper = ModelStateMapperParallel([ModelStateMapperIdentity("a"), ModelStateMapperIdentity("b")])
    groups = order_groups(mapper.state_dependency_groups(), source.tensors)
    stream = stream_groups(source, mapper, groups, torch.device("cpu"), progress_bar(0, "B", "reading", False))
    next(stream)
    stream.close()
    assert source.is_closed
    assert source.read_names == ["a"]


def test_a_bar_is_shown_on_terminals_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_file({"x": torch.ones(2)}, tmp_path / "model.safetensors")
    list(read_model_state(tmp_path, ModelStateMapperIdentity("x"), "cpu", show_progress=True, position=1))
    assert capsys.readouterr().err == ""


@pytest.mark.world_size(2)
def test_all_ranks_read_in_one_order(tmp_path: Path):
    stored = {f"layers.{index}.{part}": torch.full((3, 2), float(index)) for index in range(20) for part in "qkv"}
    if dist.get_rank() == 0:
        save_file(stored, tmp_path / "model.safetensors")
    dist.barrier()
    mappers = [
        ModelStateMapperConcatenateTensors([f"layers.{i}.{part}" for part in "qkv"], f"layers.{i}.qkv", 0)
        for i in range(20)
    ]
    names = [name for name, _ in read(tmp_path, *mappers)]
    assert len(names) == 20
    assert all_gather_object(names, dist.group.WORLD) == [names] * 2


@pytest.mark.world_size(2)
def test_a_mapper_that_distributes(tmp_path: Path):
    values = numbered(5, 3)
    if dist.get_rank() == 0:
        save_file({"x": values}, tmp_path / "model.safetensors")
    dist.barrier()
    mesh = init_device_mesh("cpu", (2,))
    ((_, tensor),) = read(tmp_path, ModelStateMapperDistribute("x", mesh, [Shard(0)]))
    assert isinstance(tensor, DTensor)
    assert torch.equal(tensor.full_tensor(), values)
    local = tensor.to_local()
    assert local.untyped_storage().nbytes() == local.nbytes
