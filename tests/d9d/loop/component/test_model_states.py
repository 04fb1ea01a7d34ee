"""Stages of the native loop from a model state and back to one, against the safetensors library."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters, DistributedContext
from d9d.core.types import TensorSpec
from d9d.loop.component.model_stage import ModelStageFactory
from d9d.loop.component.model_states import ModelStageExporter
from d9d.loop.component.tracked_modules import TrackedModules
from d9d.loop.config import ModelStageFactoryConfig, PipeliningConfig
from d9d.loop.control import (
    InitializeModelStageContext,
    InitializeModelStageResult,
    ModelProvider,
    ParallelizeModelStageContext,
    PrepareExportModelStageContext,
    PrepareExportModelStageResult,
)
from d9d.model_state.mapper import ModelStateMapper
from d9d.model_state.mapper.adapters import identity_mapper_from_module
from d9d.model_state.mapper.compose import ModelStateMapperParallel, ModelStateMapperSelectGroups
from d9d.model_state.mapper.leaf import (
    ModelStateMapperConcatenateTensors,
    ModelStateMapperIdentity,
    ModelStateMapperRename,
)
from d9d.module.parallelism.api import parallelize_hsdp
from d9d.pipelining.api import PipelineStageInfo, StageBoundary
from tests.harness.parity import named_full_parameters

SEED = 8
NUM_ROWS, WIDTH = 7, 5
"""Odd, so that shards are uneven."""
PARTS = (2, 3)
"""Rows of the tensors of the model state that are one weight of the model."""


class Stage(nn.Module):
    """An embedding in the first stage, a head in the last one, and a layer of each stage's own; perhaps tied."""

    def __init__(self, info: PipelineStageInfo, is_tied: bool) -> None:
        super().__init__()
        self.is_tied = is_tied
        index = info.current_stage
        self.mix = nn.ModuleDict({str(index): nn.Linear(WIDTH, WIDTH, dtype=torch.float64)})
        first, last = info.is_current_stage_first, info.is_current_stage_last
        self.embed = nn.Embedding(NUM_ROWS, WIDTH, dtype=torch.float64) if first else None
        self.head = nn.Linear(WIDTH, NUM_ROWS, bias=False, dtype=torch.float64) if last else None

    def tied_parameters(self) -> dict[str, str]:
        names = ("embed.weight", "head.weight") if self.is_tied else ()
        return {name: "tokens" for name in names if name in dict(self.named_parameters())}

    def forward(self, inputs: torch.Tensor, shared: None) -> torch.Tensor:
        raise NotImplementedError

    def stage_transfer_spec(self, pipeline_input: torch.Tensor, boundary: StageBoundary) -> Any:
        return TensorSpec((1, WIDTH), torch.float64)

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.reset_parameters()


def mapper_of(model: nn.Module, is_tied: bool = False) -> ModelStateMapper:
    mappers: list[ModelStateMapper] = []
    for name in model.state_dict():
        if name.startswith("mix.") and name.endswith("weight"):
            sources = [f"{name}.{part}" for part in range(len(PARTS))]
            mappers.append(ModelStateMapperConcatenateTensors(sources, name, 0, sizes=list(PARTS)))
        elif name in ("embed.weight", "head.weight"):
            mappers.append(ModelStateMapperRename("tokens" if is_tied else f"hf.{name}", name))
        else:
            mappers.append(ModelStateMapperIdentity(name))
    return ModelStateMapperParallel(mappers)


@dataclasses.dataclass
class Provider(ModelProvider[Stage]):
    is_tied: bool = False
    keep: tuple[str, ...] = ()
    omits: tuple[str, ...] = ()
    """Parameters that the mapper does not make."""
    fails_on: int | None = None
    """Rank whose mapper makes what is not there, and that cannot export."""

    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[Stage]:
        model = Stage(context.stage, self.is_tied)
        if context.dist_context.rank == self.fails_on:
            mapper = ModelStateMapperParallel([mapper_of(model), ModelStateMapperIdentity("surplus")])
        else:
            made = set(model.state_dict()).difference(self.omits)
            whole = mapper_of(model, self.is_tied)
            mapper = ModelStateMapperSelectGroups(whole, lambda group: group.outputs <= made)
        return InitializeModelStageResult(model=model, state_mapper=mapper, keep=self.keep)

    def parallelize_model_stage(self, context: ParallelizeModelStageContext[Stage]) -> None:
        mesh = context.dist_context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard"]
        parallelize_hsdp(context.model, mesh)

    def prepare_export_model_stage(
        self, context: PrepareExportModelStageContext[Stage]
    ) -> PrepareExportModelStageResult:
        if context.dist_context.rank == self.fails_on:
            raise KeyError("no mapper here")
        return PrepareExportModelStageResult(state_mapper=mapper_of(context.model, self.is_tied).inverse())


def build(
    context: DistributedContext, provider: Provider, source: Path | None, num_stages: int = 1, **config: Any
) -> TrackedModules:
    has_pipeline = context.mesh_params.has_pipeline_parallel
    schedule = {"schedule": "1f1b", "num_stages_per_rank": num_stages, "zero_bubble": False}
    pipelining = PipeliningConfig.model_validate({"schedule": schedule} if has_pipeline else {})
    config_model = ModelStageFactoryConfig(source_checkpoint=source, **config)
    _, modules = ModelStageFactory(provider, context, config_model, pipelining, SEED).build_pipeline_and_modules()
    return modules


def export(context: DistributedContext, provider: Provider, modules: TrackedModules, folder: Path) -> None:
    ModelStageExporter(provider, modules, context).export(folder)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)), dtype=torch.float64)


def foreign_tensors(num_stages: int, is_tied: bool = False) -> dict[str, torch.Tensor]:
    tensors = {"tokens": draw(NUM_ROWS, WIDTH)}
    if not is_tied:
        tensors = {"hf.embed.weight": draw(NUM_ROWS, WIDTH), "hf.head.weight": draw(NUM_ROWS, WIDTH) + 1}
    for stage in range(num_stages):
        for part, rows in enumerate(PARTS):
            tensors[f"mix.{stage}.weight.{part}"] = draw(rows, WIDTH) + stage
        tensors[f"mix.{stage}.bias"] = draw(WIDTH) + stage
    return tensors


def own_tensors(foreign: dict[str, torch.Tensor], num_stages: int) -> dict[str, torch.Tensor]:
    own: dict[str, torch.Tensor] = {}
    for name in ("embed.weight", "head.weight"):
        own[name] = foreign["tokens"] if "tokens" in foreign else foreign[f"hf.{name}"]
    for stage in range(num_stages):
        own[f"mix.{stage}.weight"] = torch.cat([foreign[f"mix.{stage}.weight.{part}"] for part in range(len(PARTS))])
        own[f"mix.{stage}.bias"] = foreign[f"mix.{stage}.bias"]
    return own


def write_source(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
    if dist.is_initialized():
        dist.barrier()
    return folder


def read_export(folder: Path) -> dict[str, torch.Tensor]:
    parts = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for part in parts for name, tensor in part.items()}


def equal(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0)


def check(degrees: dict[str, int], folder: Path, num_stages: int, *, is_tied: bool = False, **options: Any) -> None:
    """Load, look, export, and compare with what was loaded."""
    context = DeviceMeshParameters(**degrees).build()
    foreign = foreign_tensors(num_stages, is_tied)
    source = write_source(folder / "source", foreign)
    provider = Provider(is_tied=is_tied, **options)
    per_rank = num_stages // degrees.get("pipeline_parallel", 1)
    modules = build(context, provider, source, per_rank)
    expected = own_tensors(foreign, num_stages)
    for module in modules.modules:
        assert module.training
        full = named_full_parameters(module)
        equal(full, {name: expected[name] for name in full})
    export(context, provider, modules, folder / "exported")
    equal(read_export(folder / "exported"), foreign)


def test_one_process(tmp_path: Path):
    check({}, tmp_path, num_stages=1)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("degrees", "num_stages"),
    [
        ({"data_parallel_replicate": 2}, 1),
        ({"data_parallel_shard": 2}, 1),
        ({"pipeline_parallel": 2}, 2),
        ({"pipeline_parallel": 2}, 4),
    ],
    ids=str,
)
def test_two_ranks(degrees: dict[str, int], num_stages: int, tmp_path: Path):
    check(degrees, tmp_path, num_stages)


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("degrees", "num_stages"),
    [
        ({"data_parallel_replicate": 2, "data_parallel_shard": 2}, 1),
        ({"pipeline_parallel": 2, "data_parallel_shard": 2}, 2),
        ({"pipeline_parallel": 4}, 4),
    ],
    ids=str,
)
def test_four_ranks(degrees: dict[str, int], num_stages: int, tmp_path: Path):
    check(degrees, tmp_path, num_stages)


@pytest.mark.world_size(4)
def test_one_replica_reads_for_the_others(tmp_path: Path):
    """Each rank has files with other values, and each stage those of its first replica."""
    context = DeviceMeshParameters(pipeline_parallel=2, data_parallel_replicate=2).build()
    foreign = {name: tensor + context.rank for name, tensor in foreign_tensors(2).items()}
    source = tmp_path / str(context.rank)
    source.mkdir(parents=True)
    save_file(foreign, source / "model.safetensors")
    [module] = build(context, Provider(), source, load_mode="broadcast").modules
    first = 2 * context.mesh_for(DENSE_DOMAIN).get_local_rank("pp")
    expected = own_tensors({name: tensor + first for name, tensor in foreign_tensors(2).items()}, 2)
    full = named_full_parameters(module)
    equal(full, {name: expected[name] for name in full})


def test_patterns_keep_initial_values(tmp_path: Path):
    foreign = foreign_tensors(1)
    source = write_source(tmp_path, foreign)
    context = DeviceMeshParameters().build()
    omits = ("mix.0.weight", "mix.0.bias")
    [fresh] = build(context, Provider(), None).modules
    [module] = build(context, Provider(omits=omits, keep=("mix.*",)), source).modules
    expected = own_tensors(foreign, 1) | {name: fresh.get_parameter(name).detach() for name in omits}
    equal(dict(named_full_parameters(module)), expected)
    with pytest.raises(ValueError, match=r"mix\.0\.bias"):
        build(context, Provider(omits=omits, keep=("mix.*.weight",)), source)


@pytest.mark.world_size(2)
def test_what_the_source_sets_needs_no_initialisation(tmp_path: Path):
    class Bare(Provider):
        def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[Stage]:
            result = super().initialize_model_stage(context)
            # What is no method is none.
            vars(result.model)["reset_parameters"] = None
            return result

    context = DeviceMeshParameters(data_parallel_shard=2).build()
    foreign = foreign_tensors(1)
    source = write_source(tmp_path, foreign)
    [module] = build(context, Bare(), source).modules
    equal(named_full_parameters(module), own_tensors(foreign, 1))
    with pytest.raises(TypeError, match=r"no source sets: mix\.0\.bias\."):
        build(context, Bare(omits=("mix.0.bias",), keep=("mix.0.bias",)), source)
    with pytest.raises(ValueError, match=r"not produced by the mapper: 'mix\.0\.bias'"):
        build(context, Bare(omits=("mix.0.bias",)), source)


@pytest.mark.world_size(2)
def test_patterns_may_match_in_one_stage_only(tmp_path: Path):
    """The embedding is in the first stage; what no stage has is misspelt."""
    context = DeviceMeshParameters(pipeline_parallel=2).build()
    source = write_source(tmp_path, foreign_tensors(2))
    omits = ("embed.weight",)
    build(context, Provider(omits=omits, keep=("embed.*",)), source)
    with pytest.raises(
        ValueError, match=r"keep matches nothing of any stage: 'embd\.weight' \(nearest: 'embed\.weight'\)"
    ):
        build(context, Provider(omits=omits, keep=("embd.weight",)), source)


def test_a_provider_without_mapper(tmp_path: Path):
    class Forgetful(Provider):
        def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[Stage]:
            result = super().initialize_model_stage(context)
            return dataclasses.replace(result, state_mapper=None)  # pyright: ignore[reportArgumentType]

    context = DeviceMeshParameters().build()
    build(context, Forgetful(), None)
    with pytest.raises(ValueError, match="has returned no state_mapper for Stage"):
        build(context, Forgetful(), write_source(tmp_path, foreign_tensors(1)))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("degrees", [{"data_parallel_shard": 2}, {"pipeline_parallel": 2}], ids=str)
def test_a_failure_of_one_rank_is_raised_on_all(degrees: dict[str, int], tmp_path: Path):
    context = DeviceMeshParameters(**degrees).build()
    num_stages = degrees.get("pipeline_parallel", 1)
    source = write_source(tmp_path / "source", foreign_tensors(num_stages))
    with pytest.raises(ValueError, match=r"(?s)on rank 1 of 2.*surplus"):
        build(context, Provider(fails_on=1), source)
    modules = build(context, Provider(), source)
    with pytest.raises(RuntimeError, match="no mapper here"):
        export(context, Provider(fails_on=1), modules, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.world_size(2)
def test_buffers_come_from_one_rank(tmp_path: Path):
    """Each rank has counted something else, and each writes some of the files."""

    class Counting(Provider):
        def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[Stage]:
            model = Counter(context.stage, is_tied=False)
            return InitializeModelStageResult(model=model, state_mapper=identity_mapper_from_module(model))

        def prepare_export_model_stage(
            self, context: PrepareExportModelStageContext[Stage]
        ) -> PrepareExportModelStageResult:
            return PrepareExportModelStageResult(state_mapper=identity_mapper_from_module(context.model))

    context = DeviceMeshParameters(data_parallel_replicate=2).build()
    modules = build(context, Counting(), None)
    for name, buffer in modules.modules[0].named_buffers():
        buffer.fill_(len(name) + 100 * context.rank)
    ModelStageExporter(Counting(), modules, context).export(tmp_path, shard_size_gb=5e-8)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    expected = {name: torch.full((3,), len(name)) for name in ("first", "second", "third")}
    equal({name: tensor for name, tensor in read_export(tmp_path).items() if name in expected}, expected)


class Counter(Stage):
    """Has buffers beside its weights."""

    def __init__(self, info: PipelineStageInfo, is_tied: bool) -> None:
        super().__init__(info, is_tied)
        for name in ("first", "second", "third"):
            self.register_buffer(name, torch.empty(3, dtype=torch.int64))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for buffer in self.buffers(recurse=False):
            buffer.zero_()


# Tied weights


@pytest.mark.world_size(2)
@pytest.mark.parametrize("omits", [(), ("head.weight",)], ids=["both", "first"])
def test_copies_of_a_tied_weight(omits: tuple[str, ...], tmp_path: Path):
    check({"pipeline_parallel": 2}, tmp_path, 2, is_tied=True, omits=omits)


@pytest.mark.world_size(4)
def test_shards_of_a_tied_weight(tmp_path: Path):
    check({"pipeline_parallel": 2, "data_parallel_shard": 2}, tmp_path, 2, is_tied=True, omits=("head.weight",))


@pytest.mark.world_size(2)
def test_copies_with_other_values_are_refused(tmp_path: Path):
    class Apart(Provider):
        def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[Stage]:
            result = super().initialize_model_stage(context)
            return dataclasses.replace(result, state_mapper=mapper_of(result.model))

    context = DeviceMeshParameters(pipeline_parallel=2).build()
    source = write_source(tmp_path, foreign_tensors(2))
    with pytest.raises(ValueError, match=r"on rank 1 of 2.*other values for 'head\.weight' than for the copy"):
        build(context, Apart(is_tied=True), source)


@pytest.mark.world_size(2)
def test_the_first_copy_must_be_there(tmp_path: Path):
    context = DeviceMeshParameters(pipeline_parallel=2).build()
    source = write_source(tmp_path, foreign_tensors(2, is_tied=True))
    with pytest.raises(ValueError, match=r"embed\.weight"):
        build(context, Provider(is_tied=True, omits=("embed.weight",)), source)
