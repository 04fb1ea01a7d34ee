"""Pre-train the same model with a Lightning Trainer: `python ... train_lightning.py lightning.yaml`."""

import copy
import sys

import lightning as L
import torch
import torch.nn.functional as F
from data import NUM_BYTES, SourceFiles
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from d9d.core.config import Config, read_config
from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.types import TensorSpec
from d9d.internals.materialize import materialize_module
from d9d.module.block.hidden_states_aggregator import HiddenStatesAggregationMode
from d9d.module.block.moe import RouterLossParameters
from d9d.module.model import DecoderForCausalLM
from d9d.module.model.qwen3_moe import Qwen3MoEModel, Qwen3MoEParameters
from d9d.pipelining.api import PipelineStageInfo
from d9d_lightning import D9DStrategy, PipelineStages

SINGLE_RANK = {"num_replicas": 1, "rank": 0}


class ProjectConfig(Config):
    mesh: DeviceMeshParameters
    parallelize: dict[str, str]
    microbatches: int
    seed: int
    num_tokens: int
    num_steps: int
    global_batch_size: int
    learning_rate: float
    max_norm: float
    model: Qwen3MoEParameters
    router_losses: RouterLossParameters


# Gives a layer the positions of its tokens, so that it takes and returns nothing but hidden states.
class Block(nn.Module):
    def __init__(self, layer: nn.Module, rope: nn.Module):
        super().__init__()
        self.layer = layer
        self.rope = rope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return self.layer(x, self.rope(positions))


class LanguageModel(L.LightningModule):
    def __init__(self, config: ProjectConfig):
        super().__init__()
        self.config = config
        stage = PipelineStageInfo(current_stage=0, num_stages=1)
        with torch.device("meta"):
            backbone = Qwen3MoEModel(config.model, stage, HiddenStatesAggregationMode.no, enable_checkpointing=False)
            whole = DecoderForCausalLM(backbone, stage)
        # As the native trainer does it, so that both start from the same weights.
        materialize_module(whole, torch.device("cpu"), config.seed)
        for layer in backbone.decoder_layers:
            layer.mlp.use_router_losses(config.router_losses)
        # A pipeline cuts a sequence of modules by itself.
        blocks = [Block(layer, copy.deepcopy(backbone.rope)) for layer in backbone.decoder_layers]
        self.model = nn.Sequential(backbone.embed_tokens, *blocks, backbone.norm, whole.head.lm_head["bytes"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self.model(batch[:, :-1])  # (B, T, 256)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    # Without shuffling, so that a step has the same sequences on every mesh.
    def train_dataloader(self) -> DataLoader:
        dataset = SourceFiles(self.config.num_steps * self.config.global_batch_size, self.config.num_tokens)
        ranks = self.trainer.distributed_sampler_kwargs if self.config.mesh.is_distributed else SINGLE_RANK
        sampler = DistributedSampler(dataset, shuffle=False, **ranks)
        return DataLoader(dataset, self.config.global_batch_size // self.config.mesh.data_ranks, sampler=sampler)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.config.learning_rate)


class Perplexity(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step % 10 == 0 and trainer.is_global_zero:
            loss = trainer.callback_metrics["loss"]
            print(
                f"step {trainer.global_step}/{module.config.num_steps} | loss {loss:.4f} | perplexity {loss.exp():.2f}"
            )


# What crosses the boundary behind a stage. Experts read how many tokens they have, so that shapes are not found without data.
def hidden_states_of(stage: int, ids: torch.Tensor, width: int) -> TensorSpec:
    return TensorSpec((*ids.shape, width), torch.float32)


def main(config: ProjectConfig) -> None:
    assert sum(config.model.split_vocab_size.values()) == NUM_BYTES
    width = config.model.layer.hidden_size
    is_pipelined = config.mesh.has_pipeline_parallel
    strategy = D9DStrategy(
        config.mesh,
        config.parallelize,
        pipeline_module="model" if is_pipelined else None,
        stages=PipelineStages(transfer_spec=lambda stage, ids: hidden_states_of(stage, ids, width)),
        microbatches=config.microbatches,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=config.mesh.world_size,
        strategy=strategy,
        max_steps=config.num_steps,
        gradient_clip_val=config.max_norm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Perplexity()],
    )
    trainer.fit(LanguageModel(config))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Which config? For example examples/pretrain_lm/lightning.yaml")
    main(read_config(sys.argv[1], ProjectConfig))
