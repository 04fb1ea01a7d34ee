"""The small job of `regression_job` with a model that can be cut into stages."""

import dataclasses

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from d9d.core.dist_context import DENSE_DOMAIN, DistributedContext
from d9d.core.types import TensorSpec
from d9d.internals.materialize import materialize_module
from d9d.loop.control import (
    InitializeModelStageContext,
    InitializeModelStageResult,
    ModelProvider,
    ParallelizeModelStageContext,
)
from d9d.model_state.mapper.adapters import identity_mapper_from_module
from d9d.module.parallelism.api import parallelize_fsdp, parallelize_hsdp, parallelize_replicate
from d9d.pipelining.api import PipelineStageInfo, StageBoundary, distribute_layers_for_pipeline_stage
from tests.d9d.loop.run.regression_job import BASE_SEED, NUM_FEATURES

NUM_LAYERS = 8
WIDTH = 5


@dataclasses.dataclass
class Hidden:
    """What stages exchange: activations, and the row numbers of the samples, which have no gradient."""

    values: torch.Tensor
    rows: torch.Tensor


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))

    def reset_parameters(self) -> None:
        self.norm.reset_parameters()
        self.mix.reset_parameters()


class PipelinedModel(nn.Module):
    """Layers keep their numbers of the whole model as names, whatever the stage."""

    def __init__(self, dtype: torch.dtype, stage: PipelineStageInfo, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.dtype = dtype
        self.checkpoints = checkpoints
        start, end = distribute_layers_for_pipeline_stage(NUM_LAYERS, 0, 0, stage)
        self.up = nn.Linear(NUM_FEATURES, WIDTH, dtype=dtype) if stage.is_current_stage_first else None
        self.layers = nn.ModuleDict({str(index): Block(dtype) for index in range(start, end)})
        self.down = nn.Linear(WIDTH, 1, dtype=dtype) if stage.is_current_stage_last else None

    def forward(self, inputs: torch.Tensor | Hidden, shared: None) -> torch.Tensor | Hidden:
        if isinstance(inputs, torch.Tensor):
            assert self.up is not None
            inputs = Hidden(self.up(inputs), torch.arange(len(inputs)))
        assert torch.equal(inputs.rows, torch.arange(len(inputs.values)))
        x = inputs.values
        for block in self.layers.values():
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return Hidden(x, inputs.rows) if self.down is None else self.down(x)

    def stage_transfer_spec(self, pipeline_input: torch.Tensor, boundary: StageBoundary) -> Hidden:
        num_samples = len(pipeline_input)
        return Hidden(
            TensorSpec((num_samples, WIDTH), self.dtype),  # pyright: ignore[reportArgumentType]  # a tree of specs
            TensorSpec((num_samples,), torch.int64),  # pyright: ignore[reportArgumentType]
        )

    def reset_parameters(self) -> None:
        for module in (self.up, *self.layers.values(), self.down):
            if module is not None:
                module.reset_parameters()  # pyright: ignore[reportCallIssue]


class PipelinedProvider(ModelProvider[PipelinedModel]):
    def __init__(self, dtype: torch.dtype, *, checkpoints: bool = False, compiles: bool = False) -> None:
        self._dtype = dtype
        self._checkpoints = checkpoints
        self._compiles = compiles

    def initialize_model_stage(
        self, context: InitializeModelStageContext
    ) -> InitializeModelStageResult[PipelinedModel]:
        model = PipelinedModel(self._dtype, context.stage, checkpoints=self._checkpoints)
        if self._compiles:
            for block in model.layers.values():
                block.compile(backend="aot_eager")
        return InitializeModelStageResult(model=model, state_mapper=identity_mapper_from_module(model))

    def parallelize_model_stage(self, context: ParallelizeModelStageContext[PipelinedModel]) -> None:
        parallelize_data(context.dist_context, context.model)


def parallelize_data(dist_context: DistributedContext, model: PipelinedModel) -> None:
    """Distribute a stage over the data-parallel ranks of the mesh, if there are any."""
    degrees = dist_context.mesh_params
    mesh = dist_context.mesh_for(DENSE_DOMAIN)
    if degrees.has_data_parallel_shard and degrees.has_data_parallel_replicate:
        parallelize_hsdp(model, mesh["dp_replicate", "dp_cp_shard", "cp_replicate"])
    elif degrees.has_data_parallel_shard:
        for block in model.layers.values():
            parallelize_fsdp(block, mesh["dp_cp_shard"])
        parallelize_fsdp(model, mesh["dp_cp_shard"])
    elif degrees.has_data_parallel_replicate:
        parallelize_replicate(model, mesh["dp_replicate"])


def build_whole_model(dtype: torch.dtype) -> PipelinedModel:
    """The model of the job on one process, with its initial values."""
    with torch.device("meta"):
        model = PipelinedModel(dtype, PipelineStageInfo(current_stage=0, num_stages=1))
    materialize_module(model, torch.device("cpu"), BASE_SEED)
    return model
