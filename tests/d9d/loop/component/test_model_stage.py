"""Building of model stages: on meta, distributed, with memory for local shards, and with first values."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters, DistributedContext
from d9d.internals.materialize import materialize_module
from d9d.loop.component.model_stage import ModelStageFactory
from d9d.loop.component.tracked_modules import TrackedModules
from d9d.loop.config import ModelStageFactoryConfig, PipeliningConfig
from d9d.loop.control import (
    InitializeModelStageContext,
    InitializeModelStageResult,
    ModelProvider,
    ParallelizeModelStageContext,
)
from d9d.module.block.moe import MoELayer, RouterLossParameters
from d9d.module.parallelism.api import parallelize_hsdp
from d9d.peft import inject_peft_and_freeze
from d9d.peft.all import PeftStackConfig, peft_method_from_config
from tests.harness.parity import assert_close_tree, named_full_parameters

SEED = 8


class Model(nn.Module):
    def __init__(self, is_careless: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 1)
        self.is_careless = is_careless

    def reset_parameters(self) -> None:
        self.first.reset_parameters()
        if not self.is_careless:
            self.second.reset_parameters()


class Provider(ModelProvider[Model]):
    def __init__(self, *, is_careless: bool = False, parts: tuple[str, ...] = ("first", "second")) -> None:
        self.is_careless, self.parts = is_careless, parts
        self.calls: list[str] = []

    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[Model]:
        assert (context.stage.current_stage, context.stage.num_stages) == (0, 1)
        self.calls.append("initialize")
        return InitializeModelStageResult(model=Model(self.is_careless), state_mapper=None)

    def parallelize_model_stage(self, context: ParallelizeModelStageContext[Model]) -> None:
        self.calls.append("parallelize")
        assert all(parameter.is_meta for parameter in context.model.parameters())
        mesh = context.dist_context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard"]
        for name in self.parts:
            parallelize_hsdp(context.model.get_submodule(name), mesh)


def factory_of(context: DistributedContext, provider: ModelProvider[Any], **config: object) -> ModelStageFactory:
    return ModelStageFactory(provider, context, ModelStageFactoryConfig(**config), PipeliningConfig(), SEED)


def build(context: DistributedContext, provider: ModelProvider[Any], **config: object) -> TrackedModules:
    schedule, modules = factory_of(context, provider, **config).build_pipeline_and_modules()
    assert schedule.has_first_stage
    assert schedule.has_last_stage
    return modules


def local() -> DistributedContext:
    return DeviceMeshParameters().build()


def test_one_process_is_not_distributed():
    provider = Provider()
    [module] = build(local(), provider).modules
    assert provider.calls == ["initialize"]
    assert module.training
    assert not any(isinstance(parameter, DTensor) or parameter.is_meta for parameter in module.parameters())


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    "degrees",
    [
        {"data_parallel_replicate": 4},
        {"data_parallel_shard": 4},
        {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    ],
    ids=["replicate", "shard", "hybrid"],
)
def test_first_values_do_not_depend_on_the_mesh(degrees: dict[str, int]):
    provider = Provider()
    context = DeviceMeshParameters(**degrees).build()
    torch.manual_seed(context.rank)  # the caller's generator plays no part
    [module] = build(context, provider).modules
    assert provider.calls == ["initialize", "parallelize"]
    with torch.device("meta"):
        plain = Model(is_careless=False)
    materialize_module(plain, torch.device("cpu"), SEED)
    assert_close_tree(named_full_parameters(module), named_full_parameters(plain), atol=0, rtol=0)


@pytest.mark.world_size(2)
def test_undistributed_parameters_are_refused():
    context = DeviceMeshParameters(data_parallel_shard=2).build()
    with pytest.raises(
        ValueError, match=r"left 2 trainable parameters undistributed.*: second\.weight, second\.bias\."
    ):
        build(context, Provider(parts=("first",)))


@pytest.mark.world_size(2)
def test_ranks_with_the_same_data_may_hold_plain_parameters():
    context = DeviceMeshParameters(tensor_parallel=2).build()
    [module] = build(context, Provider(parts=())).modules
    assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())


class Routed(nn.Module):
    def __init__(self, losses: RouterLossParameters) -> None:
        super().__init__()
        self.moe = MoELayer(4, 3, 2, 1, True)
        self.moe.use_router_losses(losses)

    def reset_parameters(self) -> None:
        self.moe.reset_parameters()


class RoutedProvider(ModelProvider[Routed]):
    """Distributes parameters, and tells routers nothing of the ranks with other parts of sequences."""

    def __init__(self, losses: RouterLossParameters) -> None:
        self.losses = losses

    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[Routed]:
        return InitializeModelStageResult(model=Routed(self.losses), state_mapper=None)

    def parallelize_model_stage(self, context: ParallelizeModelStageContext[Routed]) -> None:
        parallelize_hsdp(context.model, context.dist_context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard"])


@pytest.mark.world_size(2)
def test_router_losses_of_parts_of_sequences_are_refused():
    context = DeviceMeshParameters(context_parallel_shard=2).build()
    with pytest.raises(ValueError, match=r"left 1 modules that would .*count for router losses, .*alone: moe\."):
        build(context, RoutedProvider(RouterLossParameters(load_balancing=0.1)))
    build(context, RoutedProvider(RouterLossParameters()))  # without losses, nothing depends on other tokens


class AdaptedProvider(ModelProvider[nn.Module]):
    """Adapters can be had by the second stage only, which then can not be distributed."""

    def __init__(self, pattern: str) -> None:
        adapters = {"kind": "lora", "module_name_pattern": pattern, "params": {"r": 2, "alpha": 2, "dropout": 0.0}}
        self.method = peft_method_from_config(PeftStackConfig.model_validate({"methods": [adapters]}))

    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[nn.Module]:
        stage = nn.ModuleDict({"in": nn.Linear(3, 3)})
        if context.stage.is_current_stage_first:
            stage["tokens"] = nn.Embedding(3, 3)
        inject_peft_and_freeze(self.method, stage)
        return InitializeModelStageResult(model=stage, state_mapper=None)

    def parallelize_model_stage(self, context: ParallelizeModelStageContext[nn.Module]) -> None:
        if not context.stage.is_current_stage_first:
            raise ValueError("no plan for this stage")


@pytest.mark.world_size(2)
def test_what_is_wrong_with_one_stage_is_raised_on_the_ranks_of_all():
    context = DeviceMeshParameters(pipeline_parallel=2).build()
    with pytest.raises(RuntimeError, match=r"on rank 0 of 2: NotImplementedError: tokens can have no adapter"):
        build(context, AdaptedProvider("in|tokens"))
    with pytest.raises(ValueError, match="on rank 1 of 2: no plan for this stage"):
        build(context, AdaptedProvider("in"))


def test_values_must_come_from_somewhere():
    with pytest.raises(RuntimeError, match=r"Model left 2 parameters.*: second\.bias, second\.weight\."):
        build(local(), Provider(is_careless=True))


def test_checkpoints_of_trainable_parameters_only():
    modules = build(local(), Provider(), checkpoint_only_trainable_parameters=True)
    modules.modules[0].first.requires_grad_(False)
    assert list(modules.state_dict()["pp_0_stage_0"]) == ["second.weight", "second.bias"]
