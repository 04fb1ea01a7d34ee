"""Models filled from model states, against torch.cat and torch's own distribution of what safetensors has written."""

import itertools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.core.placement import local_tensor
from d9d.model_state.io.load import fill_model, load_model_state
from d9d.model_state.io.load_plan import plan_load
from d9d.model_state.io.model_tensors import Kept
from d9d.model_state.io.save import save_model_state
from d9d.model_state.io.source import open_model_state
from d9d.model_state.mapper.adapters import identity_mapper_from_module
from d9d.model_state.mapper.base import ModelStateMapper, StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperParallel, ModelStateMapperSequential
from d9d.model_state.mapper.leaf import (
    ModelStateMapperCast,
    ModelStateMapperConcatenateTensors,
    ModelStateMapperDistribute,
    ModelStateMapperDrop,
    ModelStateMapperIdentity,
    ModelStateMapperPadRows,
    ModelStateMapperRename,
    ModelStateMapperStackedToInterleaved,
    ModelStateMapperTie,
)
from d9d.model_state.mapper.pieces import Box
from d9d.module.parallelism.api import parallelize_hsdp, parallelize_replicate
from tests.d9d.model_state.io.load_support import CountingSource, Tensors, Untraced, identity, load, numbered, write

SHAPES = [(1, 17), (6,), (5, 7), (), (0, 3)]


# One process


def test_parameters_and_buffers_of_a_plain_module(tmp_path: Path):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    model[0].bias.requires_grad_(False)
    model[0].weight.grad = torch.full((6, 4), 7.0)
    gradient = model[0].weight.grad
    expected = {
        name: torch.full_like(value, index + 2) for index, (name, value) in enumerate(model.state_dict().items())
    }
    parts = {f"old.{part}": numbered((2, 4), 100 * part, torch.float32) for part in (1, 2, 3)}
    expected["0.weight"] = torch.cat(list(parts.values()))
    others = {name: value for name, value in expected.items() if name != "0.weight"}
    write(tmp_path, {**parts, **others, "not.used": torch.ones(3)})
    mapper = ModelStateMapperParallel(
        [ModelStateMapperConcatenateTensors(list(parts), "0.weight", 0), *(ModelStateMapperIdentity(n) for n in others)]
    )
    before = list(model.parameters())
    load(tmp_path, mapper, model)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert model[0].weight.grad is gradient
    assert (gradient == 7).all()
    assert (model[0].weight.requires_grad, model[0].bias.requires_grad) == (True, False)
    assert model[0].weight.is_leaf


@pytest.mark.parametrize(
    ("stored", "held"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float16),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.int64, torch.int64),
        (torch.int32, torch.int64),
        (torch.uint8, torch.int16),
        (torch.bool, torch.bool),
        (torch.complex64, torch.complex64),
    ],
)
def test_dtypes_that_fit(tmp_path: Path, stored: torch.dtype, held: torch.dtype):
    values = torch.tensor([[0, 1, 1], [1, 0, 0]]).to(stored)
    model = Tensors(x=torch.zeros(2, 3, dtype=held))
    load(write(tmp_path, {"x": values}), identity("x"), model)
    assert model.x.dtype == held
    assert torch.equal(model.x.detach().view(torch.uint8), values.to(held).view(torch.uint8))


@pytest.mark.parametrize(
    ("stored", "held"),
    [
        (torch.float32, torch.int64),
        (torch.int64, torch.float32),
        (torch.int64, torch.int32),
        (torch.int8, torch.uint8),
        (torch.uint64, torch.int64),
        (torch.float32, torch.bool),
        (torch.bool, torch.uint8),
        (torch.complex64, torch.float32),
        (torch.float32, torch.complex64),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float8_e5m2, torch.float8_e4m3fn),
    ],
)
def test_dtypes_that_lose_something_are_refused(tmp_path: Path, stored: torch.dtype, held: torch.dtype):
    model = Tensors(x=torch.zeros(2, dtype=held))
    write(tmp_path, {"x": torch.ones(2).to(stored)})
    with pytest.raises(ValueError, match=f"{stored} in the model state and {held} in the model.*ModelStateMapperCast"):
        load(tmp_path, identity("x"), model)


def test_a_conversion_that_is_stated_is_made(tmp_path: Path):
    write(tmp_path, {"x": torch.tensor([1.9, -1.9])})
    model = Tensors(x=torch.zeros(2, dtype=torch.int64))
    load(tmp_path, ModelStateMapperCast("x", torch.int64), model)
    assert model.x.tolist() == [1, -1]


def test_a_large_conversion_goes_through_chunks(tmp_path: Path):
    # 3 * 2^20 elements, of which a chunk takes 2 * 2^20; the numbers have bits that bfloat16 drops.
    values = torch.arange(3 * 2**20, dtype=torch.float32).view(3, 2**20)
    model = Tensors(x=torch.zeros(3, 2**20))
    load(write(tmp_path, {"x": values}), ModelStateMapperCast("x", torch.bfloat16), model)
    assert torch.equal(model.x.detach(), values.bfloat16().float())


OVERFLOW = 65520.0
"""float16 ends at 65504; what lies nearer to 65536 than to that becomes infinite."""


@pytest.mark.parametrize("kind", ["traced", "run", "run on values"])
def test_values_out_of_the_models_range_are_refused_before_anything_is_written(tmp_path: Path, kind: str):
    functions = {"run": lambda x: (x + 0,), "run on values": lambda x: (x + int(x[0].item() > 1e30),)}
    mapper = identity("x") if kind == "traced" else Untraced(["x"], ["x"], functions[kind])
    mapper = ModelStateMapperParallel([identity("a"), mapper])
    model = Tensors(a=torch.zeros(1), x=torch.zeros(3, dtype=torch.float16))
    write(tmp_path, {"a": torch.ones(1), "x": torch.tensor([1.0, -OVERFLOW, torch.inf])})
    with pytest.raises(
        ValueError, match=r"'x' is torch.float32 .*up to 65520, which would become infinite in torch.float16"
    ):
        load(tmp_path, mapper, model)
    assert (model.a.tolist(), model.x.tolist()) == ([0], [0, 0, 0])
    # One bit less rounds down; what is infinite already may stay so.
    write(
        tmp_path, {"a": torch.ones(1), "x": torch.tensor([math.nextafter(OVERFLOW, 0) - 0.01, -torch.inf, torch.nan])}
    )
    load(tmp_path, mapper, model)
    assert model.x.tolist()[:2] == [65504, -torch.inf]
    assert math.isnan(model.x[2].item())


@pytest.mark.parametrize("kind", ["traced", "run"])
def test_values_beyond_bfloat16_are_found_where_they_are(tmp_path: Path, kind: str):
    mapper = identity("x") if kind == "traced" else Untraced(["x"], ["x"], lambda x: (x + 0,))
    model = Tensors(x=torch.zeros(2, dtype=torch.bfloat16))
    write(tmp_path, {"x": torch.tensor([1.0, torch.finfo(torch.float32).min])})
    with pytest.raises(
        RuntimeError, match=r"'x' is torch.float32 .*3.40282e\+38, which would become.*partly loaded: do not"
    ):
        load(tmp_path, mapper, model)
    write(tmp_path, {"x": torch.tensor([-torch.inf, torch.finfo(torch.bfloat16).min])})
    load(tmp_path, mapper, model)
    assert model.x.tolist() == [-torch.inf, torch.finfo(torch.bfloat16).min]


def test_memory_that_is_not_contiguous(tmp_path: Path):
    buffer = torch.zeros(10, 6)
    model = Tensors(x=buffer[::2].t())
    load(write(tmp_path, {"x": numbered((6, 5), 1, torch.float32)}), identity("x"), model)
    assert torch.equal(model.x.detach(), numbered((6, 5), 1, torch.float32))
    assert (buffer[1::2] == 0).all()


def test_everything_that_does_not_fit_comes_in_one_error(tmp_path: Path):
    model = Tensors(
        weight=torch.zeros(2, 3), bias=torch.zeros(2), steps=torch.zeros(1, dtype=torch.int64), head=torch.zeros(4)
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    write(
        tmp_path, {"weight": torch.ones(3, 2), "steps": torch.ones(1), "surplus": torch.ones(1), "heed": torch.ones(4)}
    )
    with pytest.raises(ValueError) as error:  # noqa: PT011  # read below
        load(tmp_path, identity("weight", "steps", "surplus", "head"), model)
    message = str(error.value)
    assert "for 5 reasons" in message
    assert "'weight' has the shape (3, 2) in the model state, as mapped, and (2, 3) in the model" in message
    assert "'steps' is torch.float32" in message
    assert "produces 1 tensors that the model does not have: 'surplus'" in message
    assert "1 parameters or buffers of the model are not produced by the mapper: 'bias'" in message
    assert "1 tensors are not in it: 'head' (nearest: 'heed')" in message
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_wrong_load_mode(tmp_path: Path):
    with pytest.raises(ValueError, match='"each" or "broadcast", got \'all\''):
        load(tmp_path, identity("x"), Tensors(), load_mode="all")


# Mappers that must be run


def test_a_mapper_without_a_trace_is_run(tmp_path: Path):
    model = Tensors(halves=torch.zeros(2, 2), total=torch.zeros(()))
    write(tmp_path, {"x": numbered((2, 2), 2, torch.float32)})
    load(tmp_path, Untraced(["x"], ["halves", "total"], lambda x: (x / 2, x.sum())), model)
    assert model.halves.tolist() == [[1, 1.5], [2, 2.5]]
    assert model.total.item() == 14


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x[:1],),
        lambda x: (x[: int(x.min())],),  # looks at values, which tensors without data do not have
        lambda x: (torch.cat([x, x.reshape(-1)]),),  # torch raises RuntimeError
    ],
)
def test_what_is_wrong_with_an_untraced_output_is_found_before_anything_is_written(
    tmp_path: Path, function: Callable[..., Sequence[torch.Tensor]]
):
    model = Tensors(a=torch.zeros(2), x=torch.zeros(2, 2))
    write(tmp_path, {"a": torch.ones(2), "x": torch.ones(2, 2)})
    with pytest.raises((ValueError, RuntimeError)) as error:
        load(tmp_path, ModelStateMapperParallel([identity("a"), Untraced(["x"], ["x"], function)]), model)
    assert "partly loaded" not in str(error.value)
    assert model.a.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: {}["wieght"], ValueError),  # also without data
        (lambda x: 1 // int(x.sum() - 2), RuntimeError),  # with data only
    ],
)
def test_a_mapper_that_fails_names_its_group(
    tmp_path: Path, function: Callable[..., Sequence[torch.Tensor]], kind: type[Exception]
):
    write(tmp_path, {"x": torch.ones(2), "y": torch.ones(2)})
    model = Tensors(x=torch.zeros(2), z=torch.zeros(2))
    with pytest.raises(kind, match=r"'y' cannot be mapped to 'z': (Key|ZeroDivision)Error: .*test_load\.py, line"):
        load(tmp_path, ModelStateMapperParallel([identity("x"), Untraced(["y"], ["z"], function)]), model)
    assert model.x.tolist() == [0, 0]


def test_a_mapper_that_returns_something_else_than_it_declares(tmp_path: Path):
    class Liar(Untraced):
        def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"y": group["x"]}

    write(tmp_path, {"x": torch.ones(2)})
    with pytest.raises(ValueError, match="Liar returned 'y' for the group of 'x'; it has declared 'x'"):
        load(tmp_path, Liar(["x"], ["x"], lambda x: (x,)), Tensors(x=torch.zeros(2)))


def test_a_failure_in_the_middle_says_what_the_model_is_worth(tmp_path: Path):
    class Breaking(CountingSource):
        def read(self, name: str, box: Box | None = None) -> torch.Tensor:
            if name == "b":
                raise OSError("input/output error")
            return super().read(name, box)

    model = Tensors(a=torch.zeros(2), b=torch.zeros(2))
    mapper = identity("a", "b")
    with open_model_state(write(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)})) as opened:
        source = Breaking(opened)
        plan = plan_load(source, mapper, model, Kept(), "it")
        with pytest.raises(RuntimeError, match=r"input/output error.*partly loaded: do not use it"):
            fill_model(source, mapper, torch.device("cpu"), plan)


# Ties


class LanguageModel(nn.Module):
    def __init__(self, tie: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.lm_head = nn.Linear(3, 5, bias=False)
        if tie:
            self.lm_head.weight = self.embed.weight


TABLE = numbered((5, 3), 1, torch.float32)


def mappers_of_heads() -> dict[str, ModelStateMapper]:
    names = ["embed.weight", "lm_head.weight"]
    return {
        "identity": identity_mapper_from_module(LanguageModel(tie=True)),
        "tie": ModelStateMapperTie(names, names),
        "run": ModelStateMapperParallel([Untraced([name], [name], lambda x: (x.clone(),)) for name in names]),
    }


@pytest.mark.parametrize("kind", ["identity", "tie", "run"])
def test_a_tied_head_that_is_absent_is_shared(tmp_path: Path, kind: str):
    model = LanguageModel(tie=True)
    write(tmp_path, {"embed.weight": TABLE})
    load(tmp_path, mappers_of_heads()[kind], model)
    assert model.lm_head.weight is model.embed.weight
    assert torch.equal(model.embed.weight.detach(), TABLE)


@pytest.mark.parametrize("kind", ["identity", "tie", "run"])
def test_a_tied_head_that_is_equal_is_shared(tmp_path: Path, kind: str):
    model = LanguageModel(tie=True)
    write(tmp_path, {"embed.weight": TABLE, "lm_head.weight": TABLE.clone()})
    load(tmp_path, mappers_of_heads()[kind], model)
    assert torch.equal(model.embed.weight.detach(), TABLE)


@pytest.mark.parametrize("kind", ["identity", "tie", "run"])
def test_a_tied_head_that_differs_is_refused(tmp_path: Path, kind: str):
    model = LanguageModel(tie=True)
    before = model.embed.weight.detach().clone()
    other = TABLE.clone()
    other[4, 2] += 1
    write(tmp_path, {"embed.weight": TABLE, "lm_head.weight": other})
    with pytest.raises(ValueError, match=r"lm_head\.weight") as error:
        load(tmp_path, mappers_of_heads()[kind], model)
    assert "embed.weight" in str(error.value)
    assert torch.equal(model.embed.weight.detach(), before)


def test_an_untied_head_must_be_there(tmp_path: Path):
    model = LanguageModel(tie=False)
    mapper = mappers_of_heads()["identity"]
    write(tmp_path, {"embed.weight": TABLE})
    with pytest.raises(ValueError, match=r"1 tensors are not in it: 'lm_head\.weight'"):
        load(tmp_path, mapper, model)
    with pytest.raises(ValueError, match=r"not produced by the mapper: 'lm_head\.weight'"):
        load(tmp_path, identity("embed.weight"), model)
    write(tmp_path, {"embed.weight": TABLE, "lm_head.weight": TABLE + 100})
    load(tmp_path, mapper, model)
    assert torch.equal(model.embed.weight.detach(), TABLE)
    assert torch.equal(model.lm_head.weight.detach(), TABLE + 100)


def test_a_tied_parameter_has_all_names_or_any(tmp_path: Path):
    model = LanguageModel(tie=True)
    write(tmp_path, {"head": TABLE})
    load(tmp_path, ModelStateMapperRename("head", "lm_head.weight"), model)
    assert torch.equal(model.embed.weight.detach(), TABLE)
    with pytest.raises(ValueError, match=r"'embed\.weight' is to stay as it is, but is the same parameter as 'lm_head"):
        load(tmp_path, ModelStateMapperRename("head", "lm_head.weight"), model, keep=["embed.*"])


def test_parameters_that_share_memory_are_tied_too(tmp_path: Path):
    table = torch.zeros(5, 3)
    model = Tensors(a=table, b=table)
    assert model.a is not model.b
    write(tmp_path, {"a": TABLE, "b": TABLE + 1})
    with pytest.raises(ValueError, match="'b' and 'a' are one parameter of the model"):
        load(tmp_path, identity("a", "b"), model)


# Meshes


@pytest.mark.world_size(4)
def test_shards_of_all_shapes_and_placements(tmp_path: Path):
    mesh = init_device_mesh("cpu", (2, 2))
    stored = {str(index): numbered(shape, 100 * index) for index, shape in enumerate(SHAPES)}
    write(tmp_path, stored)
    for first, second in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
        distributed = {}
        for name, value in stored.items():
            placements = [p if isinstance(p, Shard) and p.dim < value.ndim else Replicate() for p in (first, second)]
            distributed[name] = distribute_tensor(value, mesh, placements, src_data_rank=None)
        model = Tensors(**{f"t{name}": torch.zeros_like(value) for name, value in distributed.items()})
        mapper = ModelStateMapperParallel([ModelStateMapperRename(name, f"t{name}") for name in stored])
        load(tmp_path, mapper, model)
        for name, value in distributed.items():
            assert torch.equal(local_tensor(model.get_parameter(f"t{name}")), value.to_local()), (name, first, second)


def build_distributed() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Build FSDP over tensor parallelism, one linear with FSDP alone; and the values that it shall get."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 5)).double()
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    values = {name: numbered(shape, 1000 * index) for index, (name, shape) in enumerate(shapes.items())}
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    return module, values


@pytest.mark.world_size(4)
def test_a_fused_tensor_under_fsdp_over_tensor_parallelism(tmp_path: Path):
    module, values = build_distributed()
    first, second, third = (numbered((rows, 6), 10_000 * rows) for rows in (3, 1, 4))
    values["0.weight"] = torch.cat([first, second, third])
    others = {name: value for name, value in values.items() if name != "0.weight"}
    write(tmp_path, {"q": first, "k": second, "v": third, **others})
    mapper = ModelStateMapperParallel(
        [ModelStateMapperConcatenateTensors(["q", "k", "v"], "0.weight", 0), identity(*others)]
    )
    load(tmp_path, mapper, module)
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), values[name]), name
    # The module computes with what was loaded.
    inputs = torch.ones(1, 6, dtype=torch.float64)
    expected = inputs
    for index in range(3):
        expected = nn.functional.linear(expected, values[f"{index}.weight"], values[f"{index}.bias"])
    assert torch.equal(module(inputs), expected)


@pytest.mark.world_size(4)
def test_a_rank_reads_its_share_and_no_more(tmp_path: Path):
    mesh = init_device_mesh("cpu", (4,))
    parts = {f"part.{index}": numbered((8, 6), 100 * index) for index in range(2)}
    stored = {**parts, "columns": numbered((3, 8)), "scale": numbered((5,)), "unused": numbered((1000,))}
    write(tmp_path, stored)
    model = Tensors(
        fused=distribute_tensor(torch.zeros(16, 6).double(), mesh, [Shard(0)], src_data_rank=None),
        columns=distribute_tensor(torch.zeros(8, 3).double(), mesh, [Shard(1)], src_data_rank=None),
        scale=torch.zeros(5).double(),
    )

    class Transposed(ModelStateMapper):
        def state_dependency_groups(self) -> frozenset[StateGroup]:
            return frozenset([StateGroup(frozenset(["columns"]), frozenset(["columns"]))])

        def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"columns": group["columns"].t()}

        def trace(self, group):
            return {"columns": group["columns"].transpose(0, 1)}

    mapper = ModelStateMapperParallel(
        [ModelStateMapperConcatenateTensors(list(parts), "fused", 0), Transposed(), identity("scale")]
    )
    with open_model_state(tmp_path) as opened:
        source = CountingSource(opened)
        plan = plan_load(source, mapper, model, Kept(), "it")
        assert source.num_bytes == 0
        fill_model(source, mapper, torch.device("cpu"), plan)
    # 4 of 16 rows of 6, of 8 x 3 one column (or none: 3 on 4 ranks), and all of the plain one; 8 bytes each
    num_columns = 1 if dist.get_rank() < 3 else 0
    assert source.num_bytes == 8 * (4 * 6 + 8 * num_columns + 5)
    assert torch.equal(model.fused.full_tensor(), torch.cat(list(parts.values())))
    assert torch.equal(model.columns.full_tensor(), stored["columns"].t())
    assert torch.equal(model.scale.detach(), stored["scale"])


@pytest.mark.world_size(2)
def test_fused_heads_under_tensor_parallelism(tmp_path: Path):
    # 4 heads, 2 of keys and values, 3 numbers each: a rank has 2 heads of queries with their keys and values.
    q, k, v = (torch.arange(rows).view(-1, 1).double() + first for rows, first in ((12, 100), (6, 200), (6, 300)))
    write(tmp_path, {"q": q, "k": k, "v": v})
    mesh = init_device_mesh("cpu", (2,))
    model = Tensors(qkv=distribute_tensor(torch.zeros(24, 1).double(), mesh, [Shard(0)], src_data_rank=None))
    mapper = ModelStateMapperSequential(
        [
            ModelStateMapperConcatenateTensors(["q", "k", "v"], "qkv", 0),
            ModelStateMapperStackedToInterleaved("qkv", "qkv", 0, group_sizes=[6, 3, 3], num_groups=2),
        ]
    )
    load(tmp_path, mapper, model)
    rank = dist.get_rank()
    expected = [
        *range(100 + 6 * rank, 106 + 6 * rank),
        *range(200 + 3 * rank, 203 + 3 * rank),
        *range(300 + 3 * rank, 303 + 3 * rank),
    ]
    assert model.qkv.to_local().flatten().tolist() == expected


@pytest.mark.world_size(2)
def test_a_vocabulary_that_the_ranks_do_not_divide(tmp_path: Path):
    table = numbered((13, 2), 1)
    write(tmp_path, {"embed": table})
    mesh = init_device_mesh("cpu", (2,))
    empty = torch.full((14, 2), -1.0).double()
    model = Tensors(embed=distribute_tensor(empty, mesh, [Shard(0)], src_data_rank=None))
    load(tmp_path, ModelStateMapperPadRows("embed", 14), model)
    rows = table[:7] if dist.get_rank() == 0 else torch.cat([table[7:], torch.zeros(1, 2).double()])
    assert torch.equal(model.embed.to_local(), rows)
    # Torch cuts 13 rows into 7 and 6 by itself.
    model = Tensors(embed=distribute_tensor(empty[:13], mesh, [Shard(0)], src_data_rank=None))
    load(tmp_path, identity("embed"), model)
    assert torch.equal(model.embed.to_local(), table[:7] if dist.get_rank() == 0 else table[7:])


@pytest.mark.world_size(2)
def test_an_untraced_mapper_fills_shards(tmp_path: Path):
    values = numbered((5, 3))
    write(tmp_path, {"x": values})
    mesh = init_device_mesh("cpu", (2,))

    def build() -> nn.Module:
        return Tensors(x=distribute_tensor(torch.zeros(5, 3).double(), mesh, [Shard(0)], src_data_rank=None))

    model = build()
    load(tmp_path, Untraced(["x"], ["x"], lambda x: (x * 2,)), model)
    assert torch.equal(model.x.full_tensor(), values * 2)

    def distributed(placement: Shard | Replicate) -> ModelStateMapper:
        return Untraced(["x"], ["x"], lambda x: (distribute_tensor(x, mesh, [placement], src_data_rank=None),))

    model = build()
    load(tmp_path, distributed(Shard(0)), model)
    assert torch.equal(model.x.full_tensor(), values)
    model = build()
    with pytest.raises(ValueError, match=r"'x' has the placements .*Shard\(dim=1\).*Leave the distribution"):
        load(tmp_path, distributed(Shard(1)), model)
    with pytest.raises(ValueError, match="is plain in the model"):
        load(tmp_path, distributed(Shard(0)), Tensors(x=torch.zeros(5, 3).double()))
    # The mapper of the library tells what it copies, whatever layout it makes.
    load(tmp_path, ModelStateMapperDistribute("x", mesh, [Shard(1)]), model)
    assert torch.equal(model.x.full_tensor(), values)


@pytest.mark.world_size(2)
def test_a_tied_head_of_shards(tmp_path: Path):
    mesh = init_device_mesh("cpu", (2,))
    model = LanguageModel(tie=True)
    fully_shard(model, mesh=mesh)
    assert isinstance(model.embed.weight, DTensor)
    write(tmp_path, {"embed.weight": TABLE})
    mapper = mappers_of_heads()["identity"]
    load(tmp_path, mapper, model)
    assert torch.equal(model.embed.weight.full_tensor(), TABLE)
    assert model.lm_head.weight is model.embed.weight
    other = TABLE.clone()
    other[0, 0] += 1  # on rank 0, but both must refuse it
    write(tmp_path, {"embed.weight": TABLE, "lm_head.weight": other})
    with pytest.raises(ValueError, match=r"'lm_head\.weight' and 'embed\.weight' are one parameter"):
        load(tmp_path, mapper, model)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("load_mode", ["each", "broadcast"])
def test_modules_that_this_library_distributes(tmp_path: Path, load_mode: str):
    context = DeviceMeshParameters(data_parallel_replicate=2, data_parallel_shard=2).build()
    mesh = context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard"]
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 5)).double()
    parallelize_hsdp(module[0], mesh)
    parallelize_replicate(module[1], mesh)
    parallelize_hsdp(module[2], mesh, reshard_after_forward=False)
    inputs = torch.ones(1, 6, dtype=torch.float64)
    for first in (1, 50):
        values = {name: numbered(parameter.shape, first) for name, parameter in module.named_parameters()}
        write(tmp_path, values)
        load(tmp_path, identity_mapper_from_module(module), module, load_mode=load_mode)
        expected = inputs
        for index in range(3):
            expected = nn.functional.linear(expected, values[f"{index}.weight"], values[f"{index}.bias"])
        # What the forward pass gathers stays gathered in part, and must not be what the next load fills.
        assert torch.equal(module(inputs), expected)
        dist.barrier()


# One rank reads for others


@pytest.mark.world_size(4)
def test_one_rank_of_each_replica_group_reads(tmp_path: Path):
    mesh = init_device_mesh("cpu", (2, 2))
    stored = {
        "sharded": numbered((4, 3)),
        "everywhere": numbered((3,)),
        "scalar": numbered(()).bool(),
        "narrow": numbered((4,), 0, torch.float8_e4m3fn),
        "plain": numbered((2,)),
        "inner": numbered((5, 2)),
    }
    write(tmp_path, stored)
    layouts = {
        "sharded": [Replicate(), Shard(0)],
        "everywhere": [Replicate(), Replicate()],
        "scalar": [Replicate(), Replicate()],
        "narrow": [Shard(0), Replicate()],
        "inner": [Shard(1), Shard(0)],
    }
    tensors = {
        name: distribute_tensor(torch.zeros(value.shape).to(value.dtype), mesh, layouts[name], src_data_rank=None)
        for name, value in stored.items()
        if name in layouts
    }
    model = Tensors(plain=torch.zeros(2).double(), **tensors)
    # A local tensor with strides of its own.
    turned = torch.zeros(3, 2).double().t()
    model.sharded = nn.Parameter(DTensor.from_local(turned, mesh, layouts["sharded"], run_check=False))
    mapper = identity(*stored)
    with open_model_state(tmp_path) as opened:
        source = CountingSource(opened)
        plan = plan_load(source, mapper, model, Kept(), "it")
        fill_model(source, mapper, torch.device("cpu"), plan, group=dist.group.WORLD, is_broadcast=True)
    for name, layout in layouts.items():
        expected = distribute_tensor(stored[name].float(), mesh, layout, src_data_rank=None).to_local()
        assert torch.equal(local_tensor(model.state_dict()[name]).float(), expected), name
    assert torch.equal(model.plain.detach(), stored["plain"])
    row, column = mesh.get_coordinate()
    expected_bytes = {
        "plain": 16,
        "inner": 8 * (3 if column == 0 else 2),
        "sharded": 8 * 6 * (row == 0),
        "everywhere": 24 * (row == column == 0),
        "scalar": 1 * (row == column == 0),
        "narrow": 2 * (column == 0),
    }
    assert source.num_bytes == sum(expected_bytes.values())


@pytest.mark.world_size(4)
def test_broadcast_equals_each(tmp_path: Path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5)).double()
    fully_shard(module, mesh=mesh)
    values = {name: numbered(parameter.shape, 7) for name, parameter in module.named_parameters()}
    write(tmp_path, values)
    load(tmp_path, identity_mapper_from_module(module), module, load_mode="broadcast")
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        local = distribute_tensor(values[name], mesh, parameter.placements, src_data_rank=None).to_local()
        assert torch.equal(parameter.to_local(), local)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("load_mode", ["each", "broadcast"])
def test_mappers_that_communicate_run_on_all_ranks(tmp_path: Path, load_mode: str):
    mesh = init_device_mesh("cpu", (2,))
    values = numbered((4, 3))
    write(tmp_path, {"x": values, "y": values + 100})

    class Gathered(ModelStateMapper):
        def state_dependency_groups(self) -> frozenset[StateGroup]:
            return frozenset([StateGroup.of(["x"], ["x"])])

        def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            if group["x"].is_meta:
                raise RuntimeError("needs data")
            return {"x": distribute_tensor(group["x"], mesh, [Shard(0)], src_data_rank=None).full_tensor()}

    def build() -> torch.Tensor:
        return distribute_tensor(torch.zeros(4, 3).double(), mesh, [Replicate()], src_data_rank=None)

    model = Tensors(x=build(), y=build())
    mapper = ModelStateMapperParallel([Gathered(), identity("y")])
    with open_model_state(tmp_path) as opened:
        source = CountingSource(opened)
        plan = plan_load(source, mapper, model, Kept(), "it")
        is_broadcast = load_mode == "broadcast"
        fill_model(source, mapper, torch.device("cpu"), plan, group=dist.group.WORLD, is_broadcast=is_broadcast)
    assert torch.equal(model.x.to_local(), values)
    assert torch.equal(model.y.to_local(), values + 100)
    # x twice by all ranks, as nothing could be foreseen; y by the first only
    num_reads = 2 + (not is_broadcast or dist.get_rank() == 0)
    assert source.num_bytes == 12 * 8 * num_reads


@pytest.mark.world_size(2)
@pytest.mark.parametrize("load_mode", ["each", "broadcast"])
def test_a_rank_whose_shard_is_out_of_range_stops_all(tmp_path: Path, load_mode: str):
    mesh = init_device_mesh("cpu", (2,))
    write(tmp_path, {"x": torch.tensor([1.0, 2.0, OVERFLOW, 3.0])})
    empty = torch.zeros(4, dtype=torch.float16)
    model = Tensors(x=distribute_tensor(empty, mesh, [Shard(0)], src_data_rank=None))
    with pytest.raises(ValueError, match=r"on rank 1 of 2: .*'x' .*up to 65520"):
        load(tmp_path, identity("x"), model, load_mode=load_mode, process_group=dist.group.WORLD)
    assert model.x.to_local().tolist() == [0, 0]
    # An output that the mapper has distributed is looked at where it lies.
    mapper = Untraced(["x"], ["x"], lambda x: (distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None),))
    with pytest.raises(ValueError, match=r"on rank 1 of 2: .*'x' .*up to 65520"):
        load(tmp_path, mapper, model, load_mode=load_mode, process_group=dist.group.WORLD)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("load_mode", ["each", "broadcast"])
def test_an_error_of_one_rank_reaches_all(tmp_path: Path, load_mode: str):
    write(tmp_path, {"x": torch.ones(2)})
    mesh = init_device_mesh("cpu", (2,))
    model = Tensors(x=distribute_tensor(torch.zeros(2), mesh, [Replicate()], src_data_rank=None))
    rank = dist.get_rank()
    path = tmp_path if rank == 0 else tmp_path / "missing"
    with pytest.raises(FileNotFoundError, match="on rank 1 of 2: There is no model state at"):
        load(path, identity("x"), model, load_mode=load_mode, process_group=dist.group.WORLD)
    assert model.x.to_local().tolist() == [0, 0]
    dist.barrier()


def test_many_tensors_take_little_time(tmp_path: Path):
    # 8 times the tensors take 8 times as long, and 64 times if each looks at all others; others use the machine too.
    durations = []
    for num_tensors in (500, 4000):
        directory = tmp_path / str(num_tensors)
        directory.mkdir()
        model = nn.Module()
        for index in range(num_tensors):
            model.register_buffer(f"b{index}", torch.zeros(2))
        write(directory, {f"w{index}": torch.full((2,), float(index)) for index in range(num_tensors)})
        start = time.process_time()
        mapper = ModelStateMapperParallel([ModelStateMapperRename(f"w{i}", f"b{i}") for i in range(num_tensors)])
        load(directory, mapper, model)
        durations.append(time.process_time() - start)
        assert model.get_buffer(f"b{num_tensors - 1}").tolist() == [num_tensors - 1] * 2
    assert durations[1] < 24 * durations[0]


# What newcomers do


def test_tensors_that_are_not_read_are_told(tmp_path: Path):
    write(tmp_path, {"x": torch.ones(2), "x.bias": torch.ones(2), "y.bias": torch.ones(2)})
    with pytest.warns(UserWarning, match=r"2 tensors .* are not read.*'x\.bias', 'y\.bias'.*ModelStateMapperDrop"):
        load(tmp_path, identity("x"), Tensors(x=torch.zeros(2)))
    dropped = ModelStateMapperParallel([identity("x"), ModelStateMapperDrop(["x.bias"])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tmp_path, dropped, Tensors(x=torch.zeros(2)), expected=["y.bias"])


def test_paths_may_be_texts(tmp_path: Path):
    write(tmp_path, {"x": torch.ones(2)})
    model = Tensors(x=torch.zeros(2))
    load_model_state(str(tmp_path), identity("x"), "cpu", model, show_progress=False)
    save_model_state(str(tmp_path / "out"), identity("x"), model, show_progress=False)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["x"], torch.ones(2))


@pytest.mark.parametrize("mapper", [None, identity, [identity("x")]])
def test_what_is_no_mapper_is_refused(mapper, tmp_path: Path):
    write(tmp_path, {"x": torch.ones(2)})
    model = Tensors(x=torch.zeros(2))
    with pytest.raises(TypeError, match=r"a ModelStateMapper is needed.*identity_mapper_from_module"):
        load(tmp_path, mapper, model)
    with pytest.raises(TypeError, match=r"a ModelStateMapper is needed"):
        save_model_state(tmp_path / "out", mapper, model, show_progress=False)
