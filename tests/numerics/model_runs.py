"""Steps of tiny models of the catalogue: by the engine on any mesh, and in plain PyTorch on one process."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import nn

from d9d.core.dist_context import BATCH_DOMAIN, DeviceMeshParameters, DistributedContext
from d9d.core.side_loss import announce_loss
from d9d.internals.materialize import materialize_module
from d9d.loop.component import GradientManager
from d9d.loop.component.model_stage import ModelStageFactory
from d9d.loop.config import GradientManagerConfig, ModelStageFactoryConfig, PipeliningConfig
from d9d.loop.control import (
    InitializeModelStageContext,
    InitializeModelStageResult,
    ModelProvider,
    ParallelizeModelStageContext,
)
from d9d.model_state.mapper.adapters import identity_mapper_from_module
from d9d.module.block.head import SequenceCausalLMHeadShared
from d9d.module.block.moe import MoELayer, RouterLossParameters
from d9d.module.model import DecoderForCausalLM
from d9d.module.model.io import SequenceHeadShared, SequenceInput, SequenceShared
from d9d.module.parallelism.api import SequenceSharding
from d9d.module.parallelism.model import parallelize_decoder
from d9d.optim import localize_optimizer
from d9d.pipelining.api import PipelineStageInfo
from d9d.pipelining.factory import AnyPipelineScheduleConfig
from tests.d9d.module.model.catalogue import CATALOGUE, VOCAB
from tests.harness.parity import named_full_gradients, named_full_parameters

SEED = 11
NUM_STEPS, BATCH, MICROBATCH, TOKENS = 5, 8, 2, 8
LEARNING_RATE = 0.5  # far enough from the first values for what the layers compute to matter
ROUTER_LOSSES = RouterLossParameters(load_balancing=0.1, z_loss=0.01)
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "1f1b": {"schedule": "1f1b", "num_stages_per_rank": 1, "zero_bubble": False},
    "interleaved": {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": False},
    "zero_bubble_v": {"schedule": "zero_bubble_v"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is distributed."""

    degrees: dict[str, int]
    schedule: str = "gpipe"
    sequence_parallel: bool = False
    context_method: str = "ring"

    @property
    def mesh(self) -> DeviceMeshParameters:
        return DeviceMeshParameters(**self.degrees)


@dataclasses.dataclass(kw_only=True)
class Run:
    """What some steps have left. Gradients and parameters after the first of them are whole, those of this rank's stages."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels ``(BATCH, TOKENS)``, all of which count."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, sum(VOCAB.values()), (BATCH, TOKENS + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


class Provider(ModelProvider[DecoderForCausalLM[Any]]):
    def __init__(self, name: str, dtype: torch.dtype, layout: Layout, *, tied: bool = False) -> None:
        self._name, self._dtype, self._layout, self._tied = name, dtype, layout, tied

    def initialize_model_stage(
        self, context: InitializeModelStageContext
    ) -> InitializeModelStageResult[DecoderForCausalLM[Any]]:
        model = build_stage(self._name, self._dtype, context.stage, tied=self._tied)
        return InitializeModelStageResult(model=model, state_mapper=identity_mapper_from_module(model))

    def parallelize_model_stage(self, context: ParallelizeModelStageContext[DecoderForCausalLM[Any]]) -> None:
        parallelize_decoder(
            context.dist_context,
            context.model,
            context.stage,
            sequence_parallel=self._layout.sequence_parallel,
            context_method=self._layout.context_method,
        )


class TiedProvider(Provider):
    """Embeddings and head have the same weights."""

    def __init__(self, name: str, dtype: torch.dtype, layout: Layout) -> None:
        super().__init__(name, dtype, layout, tied=True)


def build_stage(
    name: str, dtype: torch.dtype, stage: PipelineStageInfo, *, tied: bool = False
) -> DecoderForCausalLM[Any]:
    model = DecoderForCausalLM(CATALOGUE[name].build(tied, stage), stage).to(dtype)
    for layer in moe_layers(model):
        layer.use_router_losses(ROUTER_LOSSES)
    return model


def moe_layers(model: nn.Module) -> list[MoELayer]:
    return [layer for layer in model.modules() if isinstance(layer, MoELayer)]


def leave(model: nn.Module) -> None:
    """Change nothing."""


def build_whole(
    name: str, dtype: torch.dtype, prepare: Callable[[nn.Module], None] = leave, *, tied: bool = False
) -> DecoderForCausalLM[Any]:
    """The model on one process with its initial values, which no mesh changes; it may be changed before it has them."""
    with torch.device("meta"):
        model = build_stage(name, dtype, PipelineStageInfo(0, 1), tied=tied)
        prepare(model)
    materialize_module(model, torch.device("cpu"), SEED)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.5)
    localize_optimizer(optimizer)  # as the native loop does
    return optimizer


def run_plainly(
    name: str,
    dtype: torch.dtype,
    *,
    tied: bool = False,
    router_losses: bool = True,
    prepare: Callable[[nn.Module], None] = leave,
    change: Callable[[nn.Module], None] = leave,
) -> Run:
    """Train on whole batches with plain PyTorch, by logits and its own cross entropy.

    `prepare` gets the model on the meta device, `change` when it has values.
    """
    model = build_whole(name, dtype, prepare, tied=tied)
    change(model)
    if not router_losses:
        for layer in moe_layers(model):
            layer.use_router_losses(RouterLossParameters())
    optimizer = optimizer_of(model)
    run = Run(losses=[], gradients={}, parameters={})
    for step in range(NUM_STEPS):
        ids, labels = batch_of(step)
        positions = torch.arange(TOKENS).expand_as(ids)
        states = model.backbone(SequenceInput(input_ids=ids), SequenceShared(position_ids=positions)).hidden_states
        loss = F.cross_entropy(model.head.logits(states).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        announce_loss(loss).backward()
        run.losses.append(loss.item())
        if step == 0:
            run.gradients = named_full_gradients(model)
        optimizer.step()
        if step == 0:
            run.parameters = named_full_parameters(model)
    return run


class EngineRun:
    """A model on a mesh."""

    def __init__(self, name: str, dtype: torch.dtype, layout: Layout, provider: type[Provider] = Provider) -> None:
        self.context: DistributedContext = layout.mesh.build()
        schedule = TypeAdapter(AnyPipelineScheduleConfig).validate_python(SCHEDULES[layout.schedule])
        factory = ModelStageFactory(
            provider(name, dtype, layout),
            self.context,
            ModelStageFactoryConfig(),
            PipeliningConfig(schedule=schedule),
            SEED,
        )
        info, self.tracked = factory.build_pipeline_and_modules()
        self.schedule = info.schedule
        self.manager = GradientManager(self.context, self.tracked, GradientManagerConfig())
        self.schedule.set_backward_observer(self.manager)

    @property
    def modules(self) -> list[nn.Module]:
        return list(self.tracked.modules)

    def microbatches(self, step: int) -> list[tuple[SequenceInput, SequenceHeadShared[SequenceCausalLMHeadShared]]]:
        """Return those of this rank, of which each has some sequences, or the same part of them."""
        mesh = self.context.mesh_for(BATCH_DOMAIN) if self.context.is_distributed else None
        ids, labels = batch_of(step)
        positions = torch.arange(TOKENS).expand_as(ids)
        tensors = [ids, labels, positions]
        if mesh is not None:
            num_ranks, rank = mesh["dp"].size(), mesh.get_local_rank("dp")
            sharding = SequenceSharding.over(mesh["cp"])
            tensors = [sharding.shard(tensor.chunk(num_ranks)[rank]) for tensor in tensors]
        parts = zip(*(tensor.split(MICROBATCH) for tensor in tensors), strict=True)
        return [
            (
                SequenceInput(input_ids=own_ids),
                SequenceHeadShared(
                    sequence=SequenceShared(position_ids=own_positions),
                    head=SequenceCausalLMHeadShared(labels=own_labels),
                ),
            )
            for own_ids, own_labels, own_positions in parts
        ]

    def backward(self, step: int) -> float:
        """Leave the gradients of a step, and return its loss."""
        inputs, shared = zip(*self.microbatches(step), strict=True)
        weights = [torch.tensor(float(each.input_ids.numel())) for each in inputs]

        # Any: what the last stage gives.
        def weighted_loss(output: Any, index: int) -> torch.Tensor:
            return self.manager.add_loss_with_weight(announce_loss(output.cross_entropy.mean()), weights[index])

        self.manager.set_required_accumulations(len(inputs), weights)
        self.schedule.step(inputs, shared, weighted_loss)
        self.manager.sync_and_scale()
        return self.manager.compute_global_loss().item()


def run_engine(
    name: str,
    dtype: torch.dtype,
    layout: Layout,
    provider: type[Provider] = Provider,
    change: Callable[[nn.Module], None] = leave,
) -> Run:
    """Train in microbatches with the parts of the native loop; `change` gets the stages when they have values."""
    engine = EngineRun(name, dtype, layout, provider)
    for module in engine.modules:
        change(module)
    optimizers = [optimizer_of(module) for module in engine.modules]
    run = Run(losses=[], gradients={}, parameters={})
    with engine.manager.install():
        for step in range(NUM_STEPS):
            run.losses.append(engine.backward(step))
            if step == 0:
                for module in engine.modules:
                    run.gradients |= named_full_gradients(module)
            for optimizer in optimizers:
                optimizer.step()
            if step == 0:
                for module in engine.modules:
                    run.parameters |= named_full_parameters(module)
            engine.manager.zero_grad()
    return run
