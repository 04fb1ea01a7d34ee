"""Checkpoints loaded into sharded modules and exported again: the files hold the same bits, on any number of ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from d9d.model_state.io.load import load_model_state
from d9d.model_state.io.save import save_model_state
from d9d.model_state.mapper.base import ModelStateMapper
from d9d.model_state.mapper.compose import ModelStateMapperParallel, ModelStateMapperSequential
from d9d.model_state.mapper.leaf import (
    ModelStateMapperConcatenateTensors,
    ModelStateMapperIdentity,
    ModelStateMapperInterleavedToStacked,
    ModelStateMapperPadRows,
    ModelStateMapperRename,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 3
PARTS = {"q": (NUM_HEADS * HEAD_DIM, 100), "k": (NUM_KV_HEADS * HEAD_DIM, 200), "v": (NUM_KV_HEADS * HEAD_DIM, 300)}
"""Rows of each part, and what the first of them is filled with."""

VOCABULARY, PADDED_VOCABULARY = 13, 16


def first_ranks(num_ranks: int) -> dist.ProcessGroup | None:
    """A group of the first ranks, where this is one of them. A collective of all."""
    group = dist.new_group(range(num_ranks))
    return group if dist.get_rank() < num_ranks and isinstance(group, dist.ProcessGroup) else None


class Sharded(nn.Module):
    """Parameters of given shapes over a mesh, all rows of -1."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, mesh: DeviceMesh):
        super().__init__()
        self.tensors = nn.ParameterDict()
        for name, shape in shapes.items():
            placements: list[Placement] = [Shard(0) if shape else Replicate()]
            empty = distribute_tensor(torch.full(shape, -1, dtype=dtype), mesh, placements)
            self.tensors[name] = nn.Parameter(empty, requires_grad=False)


def rows(first: int, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Row i is filled with first + i."""
    return (first + torch.arange(num_rows)).unsqueeze(1).expand(num_rows, 5).to(dtype).contiguous()


def fused(dtype: torch.dtype) -> torch.Tensor:
    return torch.cat([rows(first, num_rows, dtype) for num_rows, first in PARTS.values()])


def interleaved(dtype: torch.dtype) -> torch.Tensor:
    """For each key-value head: its two query heads, the key, the value."""
    q, k, v = (rows(first, num_rows, dtype) for num_rows, first in PARTS.values())
    return torch.cat([q[:6], k[:3], v[:3], q[6:], k[3:], v[3:]])


def round_trip(
    directory: Path,
    group: dist.ProcessGroup,
    files: dict[str, torch.Tensor],
    mapper: ModelStateMapper,
    expected: dict[str, torch.Tensor],
) -> None:
    """Load files into a sharded module, export it, compare, and load the export. All ranks of the group call it."""
    mesh = DeviceMesh.from_group(group, "cpu")
    dtype = next(iter(files.values())).dtype
    source, target = directory / "source", directory / "target"
    if group.rank() == 0:
        source.mkdir(parents=True)
        save_file(files, source / "model.safetensors")
    dist.barrier(group)
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    mapper = ModelStateMapperSequential(
        [mapper, ModelStateMapperParallel([ModelStateMapperRename(name, f"tensors.{name}") for name in expected])]
    )
    first, second = (Sharded(shapes, dtype, mesh) for _ in range(2))
    load_model_state(source, mapper, "cpu", first, show_progress=False, process_group=group)
    assert_holds(first, expected)
    for shard_size_gb in (4.0, 1e-9):
        save_model_state(target, mapper.inverse(), first, shard_size_gb, show_progress=False, process_group=group)
        exported = {name: t for path in target.glob("*.safetensors") for name, t in load_file(path).items()}
        assert exported.keys() == files.keys()
        for name, tensor in files.items():
            assert_same_bits(exported[name], tensor)
        dist.barrier(group)
    load_model_state(target, mapper, "cpu", second, show_progress=False, process_group=group)
    assert_holds(second, expected)


def assert_holds(module: Sharded, expected: dict[str, torch.Tensor]) -> None:
    for name, whole in expected.items():
        parameter = module.tensors[name]
        assert isinstance(parameter, DTensor)
        assert_same_bits(
            parameter.to_local(), distribute_tensor(whole, parameter.device_mesh, parameter.placements).to_local()
        )


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


@pytest.mark.world_size(4)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fused_parts_of_attention(tmp_path: Path, num_ranks: int, dtype: torch.dtype):
    group = first_ranks(num_ranks)
    if group is None:
        return
    parts = {name: rows(first, num_rows, dtype) for name, (num_rows, first) in PARTS.items()}
    sizes = [num_rows for num_rows, _ in PARTS.values()]
    apart = ModelStateMapperConcatenateTensors(list(parts), "qkv", 0, sizes=sizes)
    round_trip(tmp_path / "apart", group, parts, apart, {"qkv": fused(dtype)})
    group_sizes = [NUM_HEADS // NUM_KV_HEADS * HEAD_DIM, HEAD_DIM, HEAD_DIM]
    reordered = ModelStateMapperInterleavedToStacked("qkv", "qkv", 0, group_sizes, NUM_KV_HEADS)
    round_trip(tmp_path / "interleaved", group, {"qkv": interleaved(dtype)}, reordered, {"qkv": fused(dtype)})


@pytest.mark.world_size(4)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_a_vocabulary_that_is_padded_in_the_module_alone(tmp_path: Path, num_ranks: int):
    group = first_ranks(num_ranks)
    if group is None:
        return
    words = rows(1, VOCABULARY, torch.float32)
    padded = torch.cat([words, torch.zeros(PADDED_VOCABULARY - VOCABULARY, 5)])
    mapper = ModelStateMapperPadRows("words", PADDED_VOCABULARY, source_rows=VOCABULARY)
    round_trip(tmp_path / "words", group, {"words": words}, mapper, {"words": padded})


@pytest.mark.world_size(4)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_shapes_that_ranks_do_not_divide(tmp_path: Path, num_ranks: int):
    group = first_ranks(num_ranks)
    if group is None:
        return
    shapes = [(1, 17), (6,), (5, 7), (), (0, 3), (VOCABULARY, 2)]
    tensors = {f"t{n}": torch.arange(1.0, 1 + torch.Size(s).numel()).view(s).double() for n, s in enumerate(shapes)}
    mapper = ModelStateMapperParallel([ModelStateMapperIdentity(name) for name in tensors])
    round_trip(tmp_path / "shapes", group, tensors, mapper, tensors)
