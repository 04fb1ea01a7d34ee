"""A language model in the native trainer, its sequences over ranks, against plain PyTorch on one process.

Losses count for as many labels as they have, and documents are packed: ranks have different numbers of labels, none too.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from d9d.core.dist_context import BATCH_DOMAIN, DENSE_DOMAIN, DeviceMeshParameters
from d9d.core.types import TensorSpec
from d9d.internals.materialize import materialize_module
from d9d.loop.auto import AutoDataConfig, AutoDataProvider
from d9d.loop.control import (
    BuildForwardInputsContext,
    BuildForwardInputsResult,
    ComputeLossContext,
    ComputeLossResult,
    CreateMetricsContext,
    CreateMetricsResult,
    InitializeModelStageContext,
    InitializeModelStageResult,
    ModelProvider,
    ParallelizeModelStageContext,
    TrainTask,
    UpdateMetricsContext,
)
from d9d.metric.impl.aggregation import SumMetric
from d9d.model_state.mapper.adapters import identity_mapper_from_module
from d9d.module.block.attention import GroupedQueryAttention
from d9d.module.block.embedding import SplitTokenEmbeddings
from d9d.module.block.ffn import SwiGLU
from d9d.module.block.head import LM_IGNORE_INDEX, SequenceCausalLMHeadShared, SplitLanguageModellingHead
from d9d.module.block.normalization import RMSNorm
from d9d.module.block.positional import RotaryEmbeddingProvider, RotaryEmbeddingStyle
from d9d.module.parallelism.api import (
    SequenceSharding,
    document_ids,
    document_mask,
    parallelize_context,
    parallelize_hsdp,
    parallelize_tensor_attention,
    parallelize_tensor_embedding,
    parallelize_tensor_ffn,
    parallelize_tensor_head,
)
from d9d.pipelining.api import PipelineStageInfo, StageBoundary, distribute_layers_for_pipeline_stage
from tests.d9d.loop.run.regression_job import BASE_SEED, Job, build_job
from tests.harness.parity import assert_close_tree, named_full_parameters

EXACT = {"rtol": 1e-10, "atol": 1e-10}  # the same sums in another order, through some steps of a small model
VOCABULARY, HIDDEN, HEAD_DIM, NUM_LAYERS, TOKENS = 13, 8, 4, 4, 14
PADDED_TOKENS = 16
GLOBAL_BATCH_SIZE, MICROBATCH_SIZE, NUM_STEPS = 4, 2, 5
LEARNING_RATE, MAX_NORM = 0.5, 0.5


@dataclasses.dataclass
class Sample:
    ids: torch.Tensor
    labels: torch.Tensor
    documents: torch.Tensor


class Documents(Dataset[Sample]):
    """Two documents packed behind each other; the labels of all but a few tokens are left out."""

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (TOKENS + 1,), generator=generator)
        length = int(torch.randint(1, TOKENS, (), generator=generator))
        labels = tokens[1:].clone()
        labels[torch.rand(TOKENS, generator=generator) < 0.4] = LM_IGNORE_INDEX
        if index % 2:
            # All labels near the beginning: in contiguous order the last ranks have none.
            labels[4:] = LM_IGNORE_INDEX
        return Sample(tokens[:-1], labels, document_ids((length, TOKENS - length)))

    def __len__(self) -> int:
        return 1000


def collate(samples: Sequence[Sample]) -> Sample:
    return Sample(*(torch.stack(parts) for parts in zip(*map(dataclasses.astuple, samples), strict=True)))


@dataclasses.dataclass
class Shared:
    position_ids: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(HIDDEN)
        self.attention = GroupedQueryAttention(
            HIDDEN, 4, 2, HEAD_DIM, 1e-6, True, RotaryEmbeddingStyle.HALF, enable_sinks=True, window_size=(6, None)
        )
        self.ffn_norm = RMSNorm(HIDDEN)
        self.ffn = SwiGLU(HIDDEN, 12)

    def forward(self, states: torch.Tensor, shared: Shared, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        states = states + self.attention(self.attention_norm(states), shared.mask, rope)
        return states + self.ffn(self.ffn_norm(states))


class Decoder(nn.Module):
    def __init__(self, stage: PipelineStageInfo) -> None:
        super().__init__()
        start, end = distribute_layers_for_pipeline_stage(NUM_LAYERS, 0, 0, stage)
        sizes = {"all": VOCABULARY}
        self.embedding = SplitTokenEmbeddings(sizes, ["all"], HIDDEN) if stage.is_current_stage_first else None
        self.rope = RotaryEmbeddingProvider(100.0, HEAD_DIM, PADDED_TOKENS, RotaryEmbeddingStyle.HALF)
        self.layers = nn.ModuleDict({str(number): Layer() for number in range(start, end)})
        self.norm = RMSNorm(HIDDEN) if stage.is_current_stage_last else None
        self.head = SplitLanguageModellingHead(sizes, ["all"], HIDDEN) if stage.is_current_stage_last else None

    def forward(self, inputs: torch.Tensor, shared: Shared) -> torch.Tensor:
        states = inputs if self.embedding is None else self.embedding(inputs)
        rope = self.rope(shared.position_ids)
        for layer in self.layers.values():
            states = layer(states, shared, rope)
        if self.head is None or self.norm is None:
            return states
        return self.head(self.norm(states), SequenceCausalLMHeadShared(labels=shared.labels)).cross_entropy

    def stage_transfer_spec(self, pipeline_input: torch.Tensor, boundary: StageBoundary) -> TensorSpec:
        return TensorSpec((*pipeline_input.shape, HIDDEN), torch.float64)

    def reset_parameters(self) -> None:
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()


class Provider(ModelProvider[Decoder]):
    def __init__(self, method: str, order: str) -> None:
        self._method, self._order = method, order

    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[Decoder]:
        model = Decoder(context.stage).double()
        return InitializeModelStageResult(model=model, state_mapper=identity_mapper_from_module(model))

    def parallelize_model_stage(self, context: ParallelizeModelStageContext[Decoder]) -> None:
        model, degrees = context.model, context.dist_context.mesh_params
        dense = context.dist_context.mesh_for(DENSE_DOMAIN)
        if degrees.has_tensor_parallel:
            split_by_tensors(model, dense["tp"])
        parallelize_context(
            model, context.dist_context.mesh_for(BATCH_DOMAIN)["cp"], method=self._method, order=self._order
        )
        names = ("dp_replicate", "dp_cp_shard", "cp_replicate", *(["tp"] if degrees.has_tensor_parallel else []))
        for layer in model.layers.values():
            parallelize_hsdp(layer, dense[names])
        parallelize_hsdp(model, dense[names])


def split_by_tensors(model: Decoder, mesh: Any) -> None:
    if model.embedding is not None:
        parallelize_tensor_embedding(model.embedding, mesh)
    for layer in model.layers.values():
        parallelize_tensor_attention(layer.attention, mesh)
        parallelize_tensor_ffn(layer.ffn, mesh)
    if model.head is not None:
        parallelize_tensor_head(model.head, mesh)


class Task(TrainTask[Sample, torch.Tensor, Shared, torch.Tensor, torch.Tensor]):
    """Pads what ranks can not share evenly, and cuts all that has tokens the same way."""

    def __init__(self, sharding: SequenceSharding) -> None:
        self._sharding = sharding

    def build_forward_inputs(
        self, ctx: BuildForwardInputsContext[Sample]
    ) -> BuildForwardInputsResult[torch.Tensor, Shared, torch.Tensor]:
        cut = self._sharding
        ids, labels = cut.pad(ctx.batch.ids, 0), cut.pad(ctx.batch.labels, LM_IGNORE_INDEX)
        documents = cut.pad(ctx.batch.documents, -1)
        shared = Shared(
            position_ids=cut.position_ids(ids.shape[1]),
            labels=cut.shard(labels),
            mask=document_mask(cut.shard(documents), documents),
        )
        return BuildForwardInputsResult(input=cut.shard(ids), shared=shared, state=shared.labels)

    def compute_loss(self, ctx: ComputeLossContext[torch.Tensor, torch.Tensor]) -> ComputeLossResult:
        num_labels = (ctx.state != LM_IGNORE_INDEX).sum()
        # Without labels 0 / 0: what such a microbatch gives must not matter.
        return ComputeLossResult(loss=ctx.pipeline_results.sum() / num_labels, loss_weight=num_labels)

    def create_metrics(self, ctx: CreateMetricsContext) -> CreateMetricsResult:
        return CreateMetricsResult(metrics={"labels": SumMetric()})

    def update_metrics(self, ctx: UpdateMetricsContext[torch.Tensor]) -> None:
        ctx.metrics["labels"].update((ctx.state != LM_IGNORE_INDEX).sum().double())


def plain_training() -> tuple[list[float], list[float], nn.Module]:
    """Losses and numbers of labels of the steps, and the model after them, with neither padding nor d9d's loop."""
    with torch.device("meta"):
        model = Decoder(PipelineStageInfo(current_stage=0, num_stages=1)).double()
    materialize_module(model, torch.device("cpu"), BASE_SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.9 * step / NUM_STEPS)
    losses: list[float] = []
    counts: list[float] = []
    for step in range(NUM_STEPS):
        batch = collate([Documents()[step * GLOBAL_BATCH_SIZE + number] for number in range(GLOBAL_BATCH_SIZE)])
        mask = document_mask(batch.documents, batch.documents)
        tokens = model(batch.ids, Shared(torch.arange(TOKENS).view(1, TOKENS), batch.labels, mask))
        num_labels = (batch.labels != LM_IGNORE_INDEX).sum()
        loss = tokens.sum() / num_labels
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        counts.append(num_labels.item())
    return losses, counts, model


def build_decoder_job(
    folder: Path, mesh: DeviceMeshParameters, provider: Provider, order: str = "zigzag", schedule: str | None = None
) -> Job:
    config = AutoDataConfig(
        global_batch_size=GLOBAL_BATCH_SIZE, microbatch_size=MICROBATCH_SIZE, num_workers=0, pin_memory=False
    )
    return build_job(
        mesh,
        folder,
        total_steps=NUM_STEPS,
        overrides={"pipelining": {"schedule": {"schedule": schedule}}} if schedule else {},
        data_provider=AutoDataProvider(lambda context: Documents(), collate, config),
        # SGD, so that a step shows the gradients themselves, and a clipped one their norm.
        optimizer={"name": "sgd", "lr": LEARNING_RATE},
        task_class=lambda weight: Task(SequenceSharding.of(mesh.build(), order)),  # pyright: ignore[reportArgumentType]
        model_provider=provider,
    )


def check_job(
    folder: Path, degrees: dict[str, int], method: str = "ring", order: str = "zigzag", schedule: str | None = None
) -> None:
    job = build_decoder_job(folder, DeviceMeshParameters(**degrees), Provider(method, order), order, schedule)
    job.trainer.train()
    losses, counts, model = plain_training()
    if dist.get_rank() == 0:  # which writes them
        assert list(job.losses().values()) == pytest.approx(losses, rel=1e-10)
        assert list(job.logged("labels").values()) == counts
    expected = named_full_parameters(model)
    for stage in job.trainer._state.tracked_modules.modules:
        parameters = named_full_parameters(stage)
        assert_close_tree(parameters, {name: expected[name] for name in parameters}, **EXACT)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_two_ranks(tmp_path, method: str, order: str):
    check_job(tmp_path, {"context_parallel_replicate": 2}, method, order)


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    ("degrees", "schedule"),
    [
        ({"context_parallel_shard": 4}, None),
        ({"context_parallel_shard": 2, "data_parallel_shard": 2}, None),
        ({"context_parallel_replicate": 2, "data_parallel_shard": 2}, None),
        ({"context_parallel_shard": 2, "tensor_parallel": 2}, None),
        ({"context_parallel_shard": 2, "pipeline_parallel": 2}, "1f1b"),
        ({"context_parallel_replicate": 2, "pipeline_parallel": 2}, "zero_bubble_v"),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["ring", pytest.param("all_gather", marks=pytest.mark.exhaustive)])
def test_four_ranks(tmp_path, degrees: dict[str, int], schedule: str | None, method: str):
    check_job(tmp_path, degrees, method, schedule=schedule)


class Forgetful(Provider):
    """Distributes parameters, and forgets that attention has to see the tokens of other ranks."""

    def parallelize_model_stage(self, context: ParallelizeModelStageContext[Decoder]) -> None:
        dense = context.dist_context.mesh_for(DENSE_DOMAIN)
        parallelize_hsdp(context.model, dense["dp_replicate", "dp_cp_shard", "cp_replicate"])


@pytest.mark.world_size(2)
def test_attention_to_the_tokens_of_one_rank_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"cut over 2 .* left 4 modules .* layers\.0\.attention\.sdpa.*parallelize_context"
    ):
        build_decoder_job(tmp_path, DeviceMeshParameters(context_parallel_replicate=2), Forgetful("ring", "zigzag"))
