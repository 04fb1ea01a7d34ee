"""Modules exported from one and several ranks, read back by the safetensors library."""

import hashlib
import json
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from d9d.model_state.io.save import (
    save_model_state,
    save_model_state_pipeline_parallel,
)
from d9d.model_state.io.writer import write_model_state_local
from d9d.model_state.mapper.adapters import identity_mapper_from_module
from d9d.model_state.mapper.base import ModelStateMapper, StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperParallel, ModelStateMapperSequential
from d9d.model_state.mapper.leaf import (
    ModelStateMapperCast,
    ModelStateMapperChunkTensors,
    ModelStateMapperConcatenateTensors,
    ModelStateMapperDrop,
    ModelStateMapperGatherFullTensor,
    ModelStateMapperIdentity,
    ModelStateMapperPadRows,
    ModelStateMapperRename,
    ModelStateMapperStackedToInterleaved,
    ModelStateMapperTie,
    ModelStateMapperTranspose,
    ModelStateMapperUnstackTensors,
)

INDEX = "model.safetensors.index.json"
SHAPES = [(1, 17), (6,), (5, 7), (), (0, 3)]


def identity(*names: str) -> ModelStateMapper:
    return ModelStateMapperParallel([ModelStateMapperIdentity(name) for name in names])


def read_back(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors, each of which is in one file only."""
    tensors: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        content = load_file(path)
        assert not content.keys() & tensors.keys()
        tensors.update(content)
    if (directory / INDEX).exists():
        index = json.loads((directory / INDEX).read_text())
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"] == {"total_size": sum(t.numel() * t.element_size() for t in tensors.values())}
    return tensors


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].contiguous().view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), (
            name
        )


def first_ranks(num_ranks: int) -> dist.ProcessGroup | None:
    """A group of the first ranks, where this is one of them. A collective of all."""
    group = dist.new_group(range(num_ranks))
    return group if dist.get_rank() < num_ranks and isinstance(group, dist.ProcessGroup) else None


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).view(shape).to(dtype)


class Holder(nn.Module):
    """Holds tensors by name as buffers, of any dtype and distribution."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"step": 1}


def test_a_plain_module(tmp_path: Path):
    module = nn.Sequential(nn.Linear(3, 2), Norm())
    expected = {name: tensor for name, tensor in module.state_dict().items() if isinstance(tensor, torch.Tensor)}
    assert expected.keys() == {"0.weight", "0.bias", "1.weight", "1.count"}
    save_model_state(tmp_path, identity(*expected), module, show_progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert_same(read_back(tmp_path), expected)
    # One file for 24 + 8, and 16 + 8 bytes: 0.bias and 0.weight, 1.count and 1.weight.
    save_model_state(tmp_path, identity(*expected), module, 32 / 1e9, show_progress=False, manifest=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
        "model.sha256.json",
    ]
    assert_same(read_back(tmp_path), expected)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_shards_of_any_shape(tmp_path: Path, num_ranks: int):
    group = first_ranks(num_ranks)
    if group is None:
        return
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = {f"t{n}": numbers(shape, torch.float64) for n, shape in enumerate(SHAPES)}
    placements = {name: [Shard(0)] if tensor.ndim else [Replicate()] for name, tensor in whole.items()}
    module = Holder({name: distribute_tensor(tensor, mesh, placements[name]) for name, tensor in whole.items()})
    for shard_size_gb in (4.0, 1e-9):
        save_model_state(tmp_path, identity(*whole), module, shard_size_gb, show_progress=False, process_group=group)
        assert_same(read_back(tmp_path), whole)
        # One file for all, or one for each: the empty one joins another.
        num_files = len(list(tmp_path.glob("*.safetensors")))
        assert num_files == 1 if shard_size_gb == 4.0 else num_files in (4, 5)
        dist.barrier(group)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.uint16,
        torch.uint32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
    ],
)
def test_shards_of_any_dtype(tmp_path: Path, dtype: torch.dtype):
    mesh = init_device_mesh("cpu", (2,))
    whole = numbers((5, 3), dtype)
    half = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)]).to_local().shape[0]
    local = whole[:half] if dist.get_rank() == 0 else whole[5 - half :]
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    save_model_state(tmp_path, identity("t"), Holder({"t": tensor}), show_progress=False)
    assert_same(read_back(tmp_path), {"t": whole})


@pytest.mark.world_size(2)
def test_every_bit_pattern_survives(tmp_path: Path):
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # NaN of all kinds
    local = whole.tensor_split(2)[dist.get_rank()]
    tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    save_model_state(tmp_path, identity("t"), Holder({"t": tensor}), show_progress=False)
    assert_same(read_back(tmp_path), {"t": whole})


@pytest.mark.world_size(2)
def test_many_groups_of_several_shards(tmp_path: Path):
    """Each process hashes names in its own way: in the order of sets, ranks would gather different tensors together."""
    mesh = init_device_mesh("cpu", (2,))
    whole = {f"{n}-{part}": numbers((4, 2)) + 1000 * n + 100 * i for n in range(48) for i, part in enumerate("gud")}
    module = Holder({name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()})
    fuse = ModelStateMapperParallel(
        [ModelStateMapperConcatenateTensors([f"{n}-g", f"{n}-u", f"{n}-d"], f"{n}-all", 0) for n in range(48)]
    )
    save_model_state(tmp_path, fuse, module, 2000 / 1e9, show_progress=False)
    assert_same(read_back(tmp_path), {f"{n}-all": torch.cat([whole[f"{n}-{p}"] for p in "gud"]) for n in range(48)})


@pytest.mark.world_size(2)
def test_files_are_filled_one_after_the_other(tmp_path: Path):
    mesh = init_device_mesh("cpu", (2,))
    whole = {name: numbers((8,)) for name in "abcde"}  # 5 x 32 bytes
    module = Holder({name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()})
    names_by_limit = {160: ["abcde"], 100: ["abc", "de"], 64: ["ab", "cd", "e"]}
    for limit_bytes, expected in names_by_limit.items():
        save_model_state(tmp_path, identity(*whole), module, limit_bytes / 1e9, show_progress=False)
        found = ["".join(sorted(load_file(path))) for path in sorted(tmp_path.glob("*.safetensors"))]
        assert found == expected
        assert_same(read_back(tmp_path), whole)
        dist.barrier()


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


class Untraced(ModelStateMapper):
    """Does what another mapper does, and does not tell how."""

    def __init__(self, mapper: ModelStateMapper):
        self._mapper = mapper

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        return self._mapper.state_dependency_groups()

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self._mapper.apply(group)


def fused_mapper() -> ModelStateMapper:
    return ModelStateMapperParallel(
        [
            # 4 heads, 2 key-value heads, 3 rows each
            ModelStateMapperSequential(
                [
                    ModelStateMapperStackedToInterleaved("qkv", "qkv", dim=0, group_sizes=[6, 3, 3], num_groups=2),
                    ModelStateMapperRename("qkv", "attention.qkv"),
                ]
            ),
            ModelStateMapperTranspose("out", (0, 1)),
            ModelStateMapperChunkTensors("gate_up", ["gate", "up"], 0),
            ModelStateMapperUnstackTensors("experts", [f"expert{n}" for n in range(3)], 0),
            ModelStateMapperConcatenateTensors(["left", "right"], "both", 1),
            ModelStateMapperPadRows("embed", 9),
            ModelStateMapperTie(["bias"], ["bias", "copy"]),
            ModelStateMapperCast("norm", torch.bfloat16),
        ]
    )


@pytest.mark.world_size(4)
@pytest.mark.parametrize("is_traced", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_files_do_not_depend_on_the_number_of_ranks(tmp_path: Path, num_ranks: int, is_traced: bool):
    shapes = {"qkv": (24, 5), "out": (7, 4), "gate_up": (10, 3), "experts": (3, 4, 2), "left": (3, 2), "right": (3, 5)}
    whole = {name: numbers(shape) for name, shape in shapes.items()}
    whole |= {"embed": numbers((7, 2), torch.float16), "bias": numbers((5,), torch.float64), "norm": numbers((3,)) / 3}
    alone, group = dist.new_group([0]), first_ranks(num_ranks)
    mapper = fused_mapper() if is_traced else Untraced(fused_mapper())
    if dist.get_rank() == 0:
        assert isinstance(alone, dist.ProcessGroup)
        save_model_state(
            tmp_path / "one",
            fused_mapper(),
            Holder(whole),
            3e-7,
            show_progress=False,
            process_group=alone,
            manifest=True,
        )
        expected = fused_mapper().apply
        made = {
            name: tensor
            for state_group in fused_mapper().state_dependency_groups()
            for name, tensor in expected({name: whole[name] for name in state_group.inputs}).items()
        }
        assert_same(read_back(tmp_path / "one"), made)
    if group is None:
        return
    mesh = DeviceMesh.from_group(group, "cpu")
    for dim in (0, 1):
        tensors = {
            name: distribute_tensor(tensor, mesh, [Shard(dim) if tensor.ndim > dim else Replicate()])
            for name, tensor in whole.items()
        }
        dest = tmp_path / f"dim{dim}"
        save_model_state(dest, mapper, Holder(tensors), 3e-7, show_progress=False, process_group=group, manifest=True)
        if dist.get_rank() == 0:
            assert digests(dest) == digests(tmp_path / "one")
            # Of up to 300 bytes: 40 + 40 + 36 + 3 * 32 + 60, 60 + 84 + 6 + 112, and one of 480.
            assert len(list(dest.glob("*.safetensors"))) == 3


@pytest.mark.world_size(2)
@pytest.mark.parametrize("is_there", [True, False])
def test_ranks_that_do_not_share_a_file_system(tmp_path: Path, is_there: bool):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    whole = {name: numbers((5, 3)) for name in "abc"} | {"d": numbers((2,))}
    tensors = {name: distribute_tensor(whole[name], mesh, [Shard(0)]) for name in "abc"}
    module = Holder({**tensors, "d": whole["d"]})
    own = tmp_path / f"of_rank{rank}"
    if is_there:
        own.mkdir()
    save_model_state(own, identity(*whole), module, 100 / 1e9, show_progress=False, manifest=True)
    dist.barrier()
    assert_same(read_back(tmp_path / "of_rank0"), whole)
    assert (tmp_path / "of_rank1").exists() == is_there
    assert not is_there or list((tmp_path / "of_rank1").iterdir()) == []


@pytest.mark.world_size(2)
def test_mappers_that_look_at_values(tmp_path: Path):
    mesh = init_device_mesh("cpu", (2,))
    names = ["a", "b"]
    module = Holder({name: distribute_tensor(numbers((6,)), mesh, [Shard(0)]) for name in names})

    def first_half(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[: int(tensor.max().item()) // 2]

    save_model_state(tmp_path, OwnApply(names, first_half), module, show_progress=False)
    assert_same(read_back(tmp_path), {name: numbers((3,)) for name in names})


def test_a_mapper_that_makes_something_else_of_data(tmp_path: Path):
    other = OwnApply(["a"], lambda _, tensor: tensor if tensor.is_meta else tensor[1:])
    with pytest.raises(ValueError, match=r"a was made with the shape \(3,\) .*, but \(4,\) .* were foreseen"):
        save_model_state(tmp_path, other, Holder({"a": numbers((4,))}), show_progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.world_size(2)
def test_sharded_tensors_are_written_where_they_are(tmp_path: Path):
    """No rank needs more memory than for a chunk, and nothing is sent."""
    mesh = init_device_mesh("cpu", (2,))
    whole = {name: numbers((64, 32)) for name in "ab"}
    module = Holder({name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()})
    with CommDebugMode() as counted:
        save_model_state(tmp_path, identity("a", "b"), module, show_progress=False)
    assert counted.get_comm_counts().get(torch.ops.c10d_functional.all_gather_into_tensor, 0) == 0
    assert_same(read_back(tmp_path), whole)


@pytest.mark.world_size(4)
def test_mixed_meshes(tmp_path: Path):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts: dict[str, tuple[DeviceMesh, list[Placement]]] = {
        "both": (mesh, [Shard(0), Shard(1)]),
        "same": (mesh, [Shard(0), Shard(0)]),
        "outer": (mesh["dp"], [Shard(1)]),
        "inner": (mesh["tp"], [Shard(0)]),
        "none": (mesh, [Replicate(), Replicate()]),
    }
    whole = {name: numbers((5, 6)) for name in layouts}
    tensors = {name: distribute_tensor(whole[name], *layout) for name, layout in layouts.items()}
    # Of which each rank has a part of the sum.
    tensors["sum"] = DTensor.from_local(numbers((5, 6)) * (rank // 2), mesh["dp"], [Partial()], run_check=False)
    whole |= {"sum": numbers((5, 6)), "plain": numbers((2,))}
    module = Holder({**tensors, "plain": numbers((2,))})  # type: ignore[dict-item]
    save_model_state(tmp_path, identity(*whole), module, 200 / 1e9, show_progress=False)
    assert_same(read_back(tmp_path), whole)


@pytest.mark.world_size(4)
def test_fully_sharded_over_tensor_parallel(tmp_path: Path):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5))
    whole = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    save_model_state(tmp_path, identity_mapper_from_module(module), module, 100 / 1e9, show_progress=False)
    assert_same(read_back(tmp_path), whole)
    assert isinstance(module[0].weight, DTensor)
    assert module[0].weight.requires_grad


@pytest.mark.world_size(2)
def test_mappers_that_gather_themselves(tmp_path: Path):
    mesh = init_device_mesh("cpu", (2,))
    module = Holder({"t": distribute_tensor(numbers((5,)), mesh, [Shard(0)])})
    mapper = ModelStateMapperSequential([ModelStateMapperGatherFullTensor("t"), ModelStateMapperRename("t", "u")])
    save_model_state(tmp_path, mapper, module, show_progress=False)
    assert_same(read_back(tmp_path), {"u": numbers((5,))})


def test_tied_parameters(tmp_path: Path):
    module = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    module[1].weight = module[0].weight
    save_model_state(tmp_path, identity("0.weight", "1.weight"), module, show_progress=False)
    weight = module[0].weight.detach()
    assert_same(read_back(tmp_path), {"0.weight": weight, "1.weight": weight})
    save_model_state(tmp_path, ModelStateMapperRename("0.weight", "shared"), module, show_progress=False)
    assert_same(read_back(tmp_path), {"shared": weight})


def test_a_converted_export(tmp_path: Path):
    module = nn.Sequential(nn.Linear(2, 3).to(torch.bfloat16), Norm())
    expected = {
        "0.weight": module[0].weight.detach().float(),
        "1.weight": torch.arange(4.0),
        "1.count": torch.tensor(3),  # an int64
    }
    save_model_state(tmp_path, identity(*expected), module, show_progress=False, dtype=torch.float32)
    assert_same(read_back(tmp_path), expected)


def test_tensors_that_the_model_lacks(tmp_path: Path):
    mapper = ModelStateMapperParallel([identity("0.wieght", "zzz", "0.bias"), OptionalInput()])
    with pytest.raises(
        ValueError, match=r"the model lacks 2 of 5 tensors .*: '0\.wieght' \(nearest: '0\.weight'\), 'zzz'\. It has"
    ):
        save_model_state(tmp_path / "new", mapper, nn.Sequential(nn.Linear(1, 1)))
    assert not (tmp_path / "new").exists()
    save_model_state(tmp_path, OptionalInput(), nn.Sequential(nn.Linear(1, 1)), show_progress=False)
    assert read_back(tmp_path).keys() == {"got 0.weight"}


class OptionalInput(ModelStateMapper):
    def state_dependency_groups(self) -> frozenset[StateGroup]:
        return frozenset([StateGroup(frozenset(["0.weight", "extra"]), frozenset(["got 0.weight"]))])

    def optional_inputs(self) -> frozenset[str]:
        return frozenset(["extra"])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {f"got {name}": tensor for name, tensor in group.items()}


class OwnApply(ModelStateMapper):
    """Identity, with a part of one's own."""

    def __init__(self, names: list[str], apply: Callable[[str, torch.Tensor], torch.Tensor]):
        self._names = names
        self._apply = apply

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        return frozenset(StateGroup(frozenset([name]), frozenset([name])) for name in self._names)

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self._apply(name, tensor) for name, tensor in group.items()}


@pytest.mark.world_size(2)
def test_errors_reach_all_ranks(tmp_path: Path):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    names = [f"t{n:03}" for n in range(200)]
    module = Holder({name: distribute_tensor(numbers((6,)), mesh, [Shard(0)]) for name in names})
    applied: list[str] = []

    def fail_late(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        applied.append(name)
        if name == "t101":
            raise KeyError("no such layer")
        return tensor

    with pytest.raises(RuntimeError, match=r"of 2: RuntimeError: 't101' cannot be mapped .*KeyError: 'no such layer'"):
        save_model_state(tmp_path, OwnApply(names, fail_late), module, 24 / 1e9, show_progress=False)
    # The rank that failed stops, and the ranks agree to after 128 of the groups.
    assert max(applied) < "t130"

    def fail_to_convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(torch.complex128) if name == "t001" else tensor

    with pytest.raises(ValueError, match=r"on ranks 0, 1 of 2: t001 has the dtype torch\.complex128"):
        save_model_state(tmp_path, OwnApply(names, fail_to_convert), module, 24 / 1e9, show_progress=False)

    def fail_at_once(name: str, tensor: torch.Tensor) -> torch.Tensor:
        raise KeyError(name)

    with pytest.raises(ValueError, match=r"on ranks 0, 1 of 2: 't000' cannot be mapped .*KeyError: 't000'"):
        save_model_state(tmp_path, OwnApply(names, fail_at_once), module, 24 / 1e9, show_progress=False)

    with pytest.raises(ValueError, match="on rank 1 of 2: the model lacks 1 of 1 tensors that the mapper reads: 'x'"):
        save_model_state(tmp_path, identity("x" if rank == 1 else "t000"), module, show_progress=False)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.world_size(2)
def test_a_rank_without_memory_raises_and_the_others_do_not_wait_for_ever(tmp_path: Path):
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=3))
    assert isinstance(group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(group, "cpu")
    # 64 MiB in all: more than the allocator takes from what it has kept.
    local = torch.ones(2**23)
    module = Holder({"t": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)})
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**24 if rank == 0 else soft, hard))
    try:
        with pytest.raises(RuntimeError, match="allocate memory" if rank == 0 else "(?i)timed out|closed|reset"):
            save_model_state(tmp_path, Untraced(identity("t")), module, show_progress=False, process_group=group)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.world_size(2)
def test_ranks_with_different_modules_are_refused(tmp_path: Path):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    tensors = {name: distribute_tensor(numbers((6, 2)), mesh, [Shard(0)]) for name in "abc"}
    with pytest.raises(ValueError, match=r"would export different tensors.*'a \(6, 2\) torch.float32.*'b -> b'"):
        save_model_state(tmp_path, identity("c", "b" if rank else "a"), Holder(dict(tensors)), show_progress=False)
    # On one rank it is not distributed at all.
    mixed = {**tensors, "a": numbers((6, 2))} if rank else tensors
    with pytest.raises(ValueError, match=r"'a \(6, 2\) torch.float32 over .*', 'a \(6, 2\) torch.float32 plain'"):
        save_model_state(tmp_path, identity(*"abc"), Holder(dict(mixed)), show_progress=False)
    # One rank has not materialized its module.
    module = Holder(dict(tensors))
    with pytest.raises(ValueError, match=r"'b \(6, 2\) .* on cpu', 'b \(6, 2\) .* on meta'"):
        save_model_state(tmp_path, identity("b"), module.to("meta") if rank else module, show_progress=False)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_on_one_rank(tmp_path: Path, in_background: bool):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    names = [f"t{n}" for n in range(6)]
    module = Holder({name: distribute_tensor(torch.ones(9000), mesh, [Shard(0)]) for name in names})

    def save() -> None:
        export = save_model_state(
            tmp_path, identity(*names), module, 36000 / 1e9, show_progress=False, in_background=in_background
        )
        if export is not None:
            export.wait()

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192 if rank == 1 else soft, hard))
    try:
        with pytest.raises(
            OSError, match=r"on rank 1 of 2: .*File too large: .*\.tmp-rank0-shard-\d-\w+\.safetensors'"
        ):
            save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


def stage_of(mesh: DeviceMesh, num_layers: int) -> tuple[dict[str, torch.Tensor], list[nn.Module]]:
    """The layers of a pipeline rank, of all there are, as two stages; sharded over the other dimension."""
    rank = mesh.get_local_rank("pp")
    names = [[f"layer{2 * rank + stage}_{n}" for n in range(num_layers)] for stage in range(2)]
    whole = {name: numbers((3, 2)) + 10 * int(name[5]) for name in [n for stage in names for n in stage]}
    shards = mesh["dp"]
    stages = [Holder({name: distribute_tensor(whole[name], shards, [Shard(0)]) for name in stage}) for stage in names]
    return whole, list[nn.Module](stages)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("dims", [("pp", "dp"), ("dp", "pp")])
def test_pipelines(tmp_path: Path, dims: tuple[str, str]):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=dims)
    own, stages = stage_of(mesh, 3)
    everything = {f"layer{k}_{n}": numbers((3, 2)) + 10 * k for k in range(4) for n in range(3)}
    mapper = identity(*own)
    # 6 tensors of 24 bytes on each pipeline rank: one file, or one each of the two ranks that share its stages.
    for limit_bytes, num_files in [(144, 2), (72, 4), (1, 12)]:
        save_model_state_pipeline_parallel(tmp_path, mapper, mesh, "pp", stages, limit_bytes / 1e9, show_progress=False)
        assert_same(read_back(tmp_path), everything)
        assert len(list(tmp_path.glob("*.safetensors"))) == num_files
        dist.barrier()
    export = save_model_state_pipeline_parallel(
        tmp_path, mapper, mesh, "pp", stages, show_progress=False, in_background=True
    )
    for stage in stages:
        for tensor in stage.buffers():
            tensor.zero_()
    export.wait()
    assert_same(read_back(tmp_path), everything)


@pytest.mark.world_size(4)
def test_pipelines_that_are_refused(tmp_path: Path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    own, stages = stage_of(mesh, 1)
    first = next(iter(own))
    with pytest.raises(ValueError, match=r"the mesh has no dimension 'pipe'\. It has pp, dp"):
        save_model_state_pipeline_parallel(tmp_path, identity(*own), mesh, "pipe", stages)
    # Both pipeline ranks make the same name, on their first writer.
    mapper = ModelStateMapperRename(first, "same")
    with pytest.raises(ValueError, match=r"1 tensors were written by more than one of the ranks 0, 2: 'same'"):
        save_model_state_pipeline_parallel(tmp_path, mapper, mesh, "pp", stages, show_progress=False)
    if mesh.get_local_rank("pp") == 1:
        stages.append(Holder({first: numbers((3, 2))}))
    with pytest.raises(ValueError, match=r"on ranks 2, 3 of 4: 1 names stand for different tensors .*: 'layer2_0'"):
        save_model_state_pipeline_parallel(tmp_path, identity(*own), mesh, "pp", stages, show_progress=False)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.world_size(1)
def test_stages_may_share_a_tensor(tmp_path: Path):
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("pp",))
    first = nn.Linear(2, 2)
    second = nn.Linear(2, 2)
    second.weight, second.bias = first.weight, first.bias
    save_model_state_pipeline_parallel(
        tmp_path, identity("weight", "bias"), mesh, "pp", [first, second], show_progress=False
    )
    assert_same(read_back(tmp_path), {"weight": first.weight.detach(), "bias": first.bias.detach()})


def test_the_model_may_change_while_it_is_written(tmp_path: Path):
    module = Holder({"a": numbers((100,)), "b": numbers((3, 5)).T, "c": numbers((2,), torch.int64)})
    expected = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    export = save_model_state(tmp_path, identity(*"abc"), module, 100 / 1e9, show_progress=False, in_background=True)
    for tensor in module.buffers():
        tensor.zero_()
    # Nothing is published before it has been waited for.
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".tmp-")]
    export.wait()
    assert_same(read_back(tmp_path), expected)
    export.wait()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("shard_size_gb", [4.0, 1e-9])
def test_a_second_export_is_refused_until_the_first_is_complete(tmp_path: Path, shard_size_gb: float):
    rank, mapper = dist.get_rank(), identity("a", "b")
    first, second = (Holder({name: numbers((3,)) + offset for name in "ab"}) for offset in (0, 100))
    export = save_model_state(tmp_path, mapper, first, shard_size_gb, show_progress=False, in_background=True)
    for _ in range(2):
        with pytest.raises(
            OSError, match=r"on rank 0 of 2: another export into .* is in progress, led by process \d+ on"
        ):
            save_model_state(tmp_path, mapper, second, shard_size_gb, show_progress=False, in_background=True)
        with pytest.raises(OSError, match=r"another export into .* is in progress"):
            write_model_state_local(tmp_path, mapper, second.state_dict().items(), show_progress=False)
        # Also on one rank only. Elsewhere there is no harm.
        save_model_state(tmp_path / "other", mapper, second, shard_size_gb, show_progress=False)
    export.wait()
    assert_same(read_back(tmp_path), dict(first.state_dict()))
    dist.barrier()
    save_model_state(tmp_path, mapper, second, shard_size_gb, show_progress=False)
    assert_same(read_back(tmp_path), dict(second.state_dict()))
    assert_same(read_back(tmp_path / "other"), dict(second.state_dict()))
    dist.barrier()
    if rank == 0:
        assert not list(tmp_path.glob(".tmp*"))


def test_shards_that_are_exchanged_before_they_get_their_names(tmp_path: Path):
    module = Holder({"a": numbers((3,)), "b": numbers((5,))})
    for exchange, message in [(lambda path: path.unlink(), "is not there"), (truncate, r"has 3 bytes, of \d+")]:
        export = save_model_state(tmp_path, identity("a", "b"), module, 1e-9, show_progress=False, in_background=True)
        [shard] = tmp_path.glob(".tmp-rank0-shard-0-*")
        while not shard.read_bytes().endswith(numbers((3,)).float().numpy().tobytes()):
            time.sleep(0.01)
        # It has no header yet, so that nobody takes it for complete.
        assert shard.read_bytes()[:8] == bytes(8)
        exchange(shard)
        with pytest.raises(FileNotFoundError, match=rf"1 of 2 shards .*shard-0-\w+\.safetensors {message}"):
            export.wait()
        assert list(tmp_path.iterdir()) == []


def truncate(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"123")


def test_what_is_dropped_need_not_be_there(tmp_path: Path):
    mapper = ModelStateMapperParallel([identity("a"), ModelStateMapperDrop(["b", "absent"])])
    for names in ("ab", "a"):
        save_model_state(tmp_path, mapper, Holder({name: numbers((3,)) for name in names}), show_progress=False)
        assert_same(read_back(tmp_path), {"a": numbers((3,))})


def test_what_cannot_be_stored_is_refused_at_once(tmp_path: Path):
    for name, tensor, message in [
        ("b", torch.ones(2, dtype=torch.complex128), "b has the dtype"),
        ("__metadata__", numbers((2,)), "a tensor cannot be called __metadata__"),
        ("c", torch.ones(2).to_sparse(), "c has the layout"),
    ]:
        with pytest.raises(ValueError, match=message):
            save_model_state(
                tmp_path, identity("a", name), Holder({"a": numbers((2,)), name: tensor}), show_progress=False
            )
    assert list(tmp_path.iterdir()) == []


def test_errors_in_the_background(tmp_path: Path):
    with pytest.raises(ValueError, match="a has values beyond the range"):
        save_model_state(
            tmp_path,
            identity("a"),
            Holder({"a": torch.tensor([1e6])}),
            show_progress=False,
            dtype=torch.float16,
            in_background=True,
        ).wait()
