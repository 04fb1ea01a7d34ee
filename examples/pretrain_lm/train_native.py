"""Pre-train a small Qwen3-MoE with the native trainer: `torchrun ... train_native.py native.yaml`."""

import json
import math
import os
import sys
from pathlib import Path

import torch
from data import NUM_BYTES, SourceFiles

from d9d.core.config import Config, read_config
from d9d.core.dist_context import DeviceMeshParameters
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
from d9d.module.block.head import SequenceCausalLMHeadShared
from d9d.module.block.hidden_states_aggregator import HiddenStatesAggregationMode
from d9d.module.block.moe import MoELayer, RouterLossParameters
from d9d.module.model import DecoderForCausalLM
from d9d.module.model.io import SequenceHeadShared, SequenceInput, SequenceShared
from d9d.module.model.qwen3_moe import Qwen3MoEModel, Qwen3MoEParameters
from d9d.module.parallelism.model import decoder_mesh_problems, parallelize_qwen3_moe_model


class LanguageModelTask(TrainTask):
    # Called on every rank of a pipeline, with the same microbatch.
    def build_forward_inputs(self, ctx: BuildForwardInputsContext) -> BuildForwardInputsResult:
        ids, labels = ctx.batch[:, :-1], ctx.batch[:, 1:]
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        shared = SequenceHeadShared(
            sequence=SequenceShared(position_ids=positions), head=SequenceCausalLMHeadShared(labels=labels)
        )
        # Here and not with the loss, since all stages balance experts, and only the last one sees the loss.
        num_tokens = torch.tensor(float(labels.numel()), device=ids.device)
        return BuildForwardInputsResult(
            input=SequenceInput(input_ids=ids), shared=shared, state=None, loss_weight=num_tokens
        )

    # Called on the ranks that have the last stage.
    def compute_loss(self, ctx: ComputeLossContext) -> ComputeLossResult:
        return ComputeLossResult(loss=ctx.pipeline_results.cross_entropy.mean())


class Qwen3Provider(ModelProvider):
    def __init__(self, params: Qwen3MoEParameters, router_losses: RouterLossParameters):
        self._params = params
        self._router_losses = router_losses

    # Called before the ranks are connected: heads, experts or layers that they can not share evenly.
    def mesh_problems(self, mesh: DeviceMeshParameters, num_stages: int) -> list[str]:
        return decoder_mesh_problems(self._params, mesh, num_stages)

    # Called once for each stage that this rank hosts.
    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult:
        backbone = Qwen3MoEModel(
            self._params, context.stage, HiddenStatesAggregationMode.no, enable_checkpointing=False
        )
        model = DecoderForCausalLM(backbone, context.stage)
        for layer in model.modules():
            if isinstance(layer, MoELayer):
                layer.use_router_losses(self._router_losses)
        return InitializeModelStageResult(model=model, state_mapper=identity_mapper_from_module(model))

    def parallelize_model_stage(self, context: ParallelizeModelStageContext):
        parallelize_qwen3_moe_model(context.dist_context, context.model, context.stage)


class ProjectConfig(Config):
    mesh: DeviceMeshParameters
    num_tokens: int
    model: Qwen3MoEParameters
    router_losses: RouterLossParameters
    trainer: TrainerConfig
    data: AutoDataConfig
    optimizer: AutoOptimizerConfig
    lr_scheduler: AutoLRSchedulerConfig


def print_perplexities(log: Path, run: str) -> None:
    for line in log.read_text().splitlines():
        point = json.loads(line)
        if point["run"] == run and point["name"] == "loss":
            print(f"step {point['step']} | loss {point['value']:.4f} | perplexity {math.exp(point['value']):.2f}")


def main(config: ProjectConfig) -> None:
    assert sum(config.model.split_vocab_size.values()) == NUM_BYTES
    num_samples = config.trainer.schedule.total_steps * config.data.global_batch_size
    TrainingConfigurator(
        mesh=config.mesh,
        parameters=config.trainer,
        model_provider=Qwen3Provider(config.model, config.router_losses),
        task_provider=lambda ctx: LanguageModelTask(),
        data_provider=AutoDataProvider(
            dataset_factory=lambda dist_context: SourceFiles(num_samples, config.num_tokens),
            collator=lambda samples: torch.stack(list(samples)),
            config=config.data,
        ),
        optimizer_provider=AutoOptimizerProvider(config.optimizer),
        lr_scheduler_provider=AutoLRSchedulerProvider(config.lr_scheduler),
    ).configure().train()
    if os.environ.get("RANK", "0") == "0":
        print_perplexities(Path(config.trainer.logging.tracker.path), config.trainer.run.name)


if len(sys.argv) != 2:
    sys.exit("Which config? For example examples/pretrain_lm/native.yaml")
main(read_config(sys.argv[1], ProjectConfig))
