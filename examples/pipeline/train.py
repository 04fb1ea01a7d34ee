"""Train a small character-level language model that is cut into pipeline stages: `torchrun ... train.py config.yaml`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from d9d.core.config import Config, read_config
from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.core.types import TensorSpec
from d9d.loop.auto import (
    AutoDataConfig,
    AutoDataProvider,
    AutoLRSchedulerConfig,
    AutoLRSchedulerProvider,
    AutoOptimizerConfig,
    AutoOptimizerProvider,
)
from d9d.loop.config import TrainerConfig
from d9d.loop.control import (
    BuildForwardInputsContext,
    BuildForwardInputsResult,
    ComputeLossContext,
    ComputeLossResult,
    InitializeModelStageContext,
    InitializeModelStageResult,
    ModelProvider,
    ParallelizeModelStageContext,
    TrainTask,
)
from d9d.loop.run import TrainingConfigurator
from d9d.model_state.mapper.adapters import identity_mapper_from_module
from d9d.module.parallelism.api import parallelize_hsdp
from d9d.pipelining.api import PipelineStageInfo, StageBoundary, distribute_layers_for_pipeline_stage

TEXT = Path(__file__).with_name("poem.txt").read_text(encoding="utf-8")
ALPHABET = sorted(set(TEXT))

# Names of dimensions: B samples, T characters of a sample, V characters of the alphabet, C channels, H heads.


# Sample i is the text from character i on, over and over.
class PoemDataset(Dataset):
    def __init__(self, num_samples: int, length: int):
        number = {character: i for i, character in enumerate(ALPHABET)}
        self._text = torch.tensor([number[character] for character in TEXT])
        self._starts = torch.randint(len(TEXT), (num_samples,), generator=torch.Generator().manual_seed(0))
        self._offsets = torch.arange(length + 1)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._text[(self._starts[index] + self._offsets) % len(self._text)]  # (T + 1,)

    def __len__(self) -> int:
        return len(self._starts)

    # Stacks the samples into one microbatch.
    @staticmethod
    def collate(samples: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(samples))  # (B, T + 1)


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x = x + self._attend(self.attention_norm(x), bias)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def _attend(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # 3 of (B, H, T, C / H)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))  # (B, T, C)

    def reset_parameters(self):
        for module in self.children():
            module.reset_parameters()


class ModelConfig(Config):
    num_layers: int
    width: int
    num_heads: int


# One stage of the model. All of it, if the pipeline has a single stage.
class PoemModel(nn.Module):
    def __init__(self, config: ModelConfig, stage: PipelineStageInfo):
        super().__init__()
        self.config = config
        self.stage = stage
        # The ends of the model do more than the layers between: count each of them as a layer.
        start, end = distribute_layers_for_pipeline_stage(
            config.num_layers, num_virtual_layers_pre=1, num_virtual_layers_post=1, stage=stage
        )
        # Names are those of the whole model, so that initial values do not depend on where it was cut.
        self.layers = nn.ModuleDict({str(i): Block(config.width, config.num_heads) for i in range(start, end)})
        # The first stage turns characters into vectors with it, the last one scores vectors against characters.
        has_embedding = stage.is_current_stage_first or stage.is_current_stage_last
        self.embedding = nn.Embedding(len(ALPHABET), config.width) if has_embedding else None
        self.norm = nn.LayerNorm(config.width) if stage.is_current_stage_last else None

    # `inputs` are characters on the first stage, and what the stage before has returned on the others.
    # `shared` is the same on all stages: each rank has it from the task, and nobody sends it.
    def forward(self, inputs: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        x = self.embedding(inputs) if self.stage.is_current_stage_first else inputs  # (B, T, C)
        for layer in self.layers.values():
            x = layer(x, shared)
        if self.stage.is_current_stage_last:
            x = F.linear(self.norm(x), self.embedding.weight)  # (B, T, V)
        return x

    # What crosses the boundaries of the stage, from the pipeline input: here the same before and behind each stage.
    def stage_transfer_spec(self, pipeline_input: torch.Tensor, boundary: StageBoundary) -> TensorSpec:
        return TensorSpec(shape=(*pipeline_input.shape, self.config.width), dtype=torch.float32)

    # The first and the last stage have a copy each. With one key, the copies start and stay equal.
    def tied_parameters(self) -> Mapping[str, str]:
        return {} if self.embedding is None else {"embedding.weight": "embedding"}

    def reset_parameters(self):
        for layer in self.layers.values():
            layer.reset_parameters()
        if self.embedding is not None:
            nn.init.normal_(self.embedding.weight, std=0.05)
        if self.norm is not None:
            self.norm.reset_parameters()


@dataclass
class PoemState:
    targets: torch.Tensor


class PoemTask(TrainTask):
    def __init__(self, num_heads: int):
        self._num_heads = num_heads

    # Called on every rank of a pipeline, with the same microbatch.
    def build_forward_inputs(self, ctx: BuildForwardInputsContext) -> BuildForwardInputsResult:
        inputs, targets = ctx.batch[:, :-1], ctx.batch[:, 1:]
        return BuildForwardInputsResult(
            input=inputs, shared=self._attention_bias(inputs.shape[1]), state=PoemState(targets=targets)
        )

    # Called on the rank that has the last stage.
    def compute_loss(self, ctx: ComputeLossContext) -> ComputeLossResult:
        loss = F.cross_entropy(ctx.pipeline_results.flatten(0, 1), ctx.state.targets.flatten())
        return ComputeLossResult(loss=loss, loss_weight=None)

    # The farther away a character is, the less it counts; those ahead do not at all. https://arxiv.org/abs/2108.12409
    def _attention_bias(self, length: int) -> torch.Tensor:
        distance = torch.arange(length).unsqueeze(1) - torch.arange(length)  # (T, T)
        slopes = 2.0 ** -torch.arange(1, self._num_heads + 1)  # (H,)
        bias = -slopes.view(-1, 1, 1) * distance  # (H, T, T)
        return bias.masked_fill(distance < 0, float("-inf"))


class PoemModelProvider(ModelProvider[PoemModel]):
    def __init__(self, config: ModelConfig):
        self._config = config

    # Called once for each stage that this rank hosts.
    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[PoemModel]:
        model = PoemModel(self._config, context.stage)
        return InitializeModelStageResult(model=model, state_mapper=identity_mapper_from_module(model))

    # Data parallelism of a stage is chosen as without a pipeline.
    def parallelize_model_stage(self, context: ParallelizeModelStageContext[PoemModel]):
        mesh = context.dist_context.mesh_for(DENSE_DOMAIN)
        parallelize_hsdp(context.model, mesh=mesh["dp_replicate", "dp_cp_shard", "cp_replicate"])


class ProjectConfig(Config):
    mesh: DeviceMeshParameters
    model: ModelConfig
    trainer: TrainerConfig
    data: AutoDataConfig
    optimizer: AutoOptimizerConfig
    lr_scheduler: AutoLRSchedulerConfig


if len(sys.argv) != 2:
    sys.exit("Which config? For example examples/pipeline/config.yaml")
config = read_config(sys.argv[1], ProjectConfig)

trainer = TrainingConfigurator(
    mesh=config.mesh,
    parameters=config.trainer,
    model_provider=PoemModelProvider(config.model),
    task_provider=lambda ctx: PoemTask(config.model.num_heads),
    data_provider=AutoDataProvider(
        dataset_factory=lambda dist_context: PoemDataset(num_samples=65536, length=32),
        collator=PoemDataset.collate,
        config=config.data,
    ),
    optimizer_provider=AutoOptimizerProvider(config.optimizer),
    lr_scheduler_provider=AutoLRSchedulerProvider(config.lr_scheduler),
).configure()

trainer.train()
