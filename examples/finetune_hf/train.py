"""Fine-tune a checkpoint of `transformers` on a mesh, and hand it back: `torchrun --nproc-per-node 2 .../train.py`."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch.utils.data import Dataset
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

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
    PrepareExportModelStageContext,
    PrepareExportModelStageResult,
    TrainTask,
)
from d9d.loop.run import Trainer, TrainingConfigurator
from d9d.module.block.head import SequenceCausalLMHeadShared
from d9d.module.block.hidden_states_aggregator import HiddenStatesAggregationMode
from d9d.module.model import DecoderForCausalLM
from d9d.module.model.io import SequenceHeadShared, SequenceInput, SequenceShared
from d9d.module.model.qwen3_moe import (
    Qwen3MoEExpertsFormat,
    Qwen3MoELayerParameters,
    Qwen3MoEModel,
    Qwen3MoEParameters,
    mapper_from_huggingface_qwen3_moe_for_causal_lm,
    mapper_to_huggingface_qwen3_moe_for_causal_lm,
)
from d9d.module.parallelism.model import decoder_mesh_problems, parallelize_qwen3_moe_model

RUNS = Path("runs") / "finetune_hf"
SOURCE, TUNED = RUNS / "source", RUNS / "tuned"
NUM_STEPS, BATCH, LENGTH = 30, 8, 32
VOCABULARY = 64

# What `transformers` builds, and the same in our terms.
HF_CONFIG = Qwen3MoeConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    max_position_embeddings=LENGTH,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
PARAMS = Qwen3MoEParameters(
    num_hidden_layers=HF_CONFIG.num_hidden_layers,
    rope_base=10000,
    max_position_ids=LENGTH,
    split_vocab_size={"tokens": VOCABULARY},
    split_vocab_order=["tokens"],
    layer=Qwen3MoELayerParameters(
        hidden_size=HF_CONFIG.hidden_size,
        intermediate_size=HF_CONFIG.moe_intermediate_size,
        num_experts=HF_CONFIG.num_experts,
        experts_top_k=HF_CONFIG.num_experts_per_tok,
        num_attention_heads=HF_CONFIG.num_attention_heads,
        num_key_value_heads=HF_CONFIG.num_key_value_heads,
        head_dim=HF_CONFIG.head_dim,
        rms_norm_eps=HF_CONFIG.rms_norm_eps,
    ),
)
# `transformers` writes each expert to a tensor of its own.
FORMAT = Qwen3MoEExpertsFormat.MODULE_LIST


# Sequences to learn: each token is the one before plus a step that the sequence begins with.
class Counting(Dataset):
    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        start, step = torch.randint(1, 8, (2,), generator=generator)
        return (start + step * torch.arange(LENGTH + 1)) % VOCABULARY  # (T + 1,)

    def __len__(self) -> int:
        return NUM_STEPS * BATCH


class Task(TrainTask):
    def build_forward_inputs(self, ctx: BuildForwardInputsContext) -> BuildForwardInputsResult:
        ids, labels = ctx.batch[:, :-1], ctx.batch[:, 1:]
        shared = SequenceHeadShared(
            sequence=SequenceShared(position_ids=torch.arange(LENGTH, device=ids.device).expand_as(ids)),
            head=SequenceCausalLMHeadShared(labels=labels),
        )
        return BuildForwardInputsResult(input=SequenceInput(input_ids=ids), shared=shared, state=None)

    def compute_loss(self, ctx: ComputeLossContext) -> ComputeLossResult:
        return ComputeLossResult(loss=ctx.pipeline_results.cross_entropy.mean())


class Provider(ModelProvider):
    # Called before the ranks are connected: heads, experts or layers that they can not share evenly.
    def mesh_problems(self, mesh: DeviceMeshParameters, num_stages: int) -> list[str]:
        return decoder_mesh_problems(PARAMS, mesh, num_stages)

    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult:
        backbone = Qwen3MoEModel(PARAMS, context.stage, HiddenStatesAggregationMode.no, enable_checkpointing=False)
        mapper = mapper_from_huggingface_qwen3_moe_for_causal_lm(PARAMS, FORMAT)
        return InitializeModelStageResult(model=DecoderForCausalLM(backbone, context.stage), state_mapper=mapper)

    def parallelize_model_stage(self, context: ParallelizeModelStageContext):
        parallelize_qwen3_moe_model(context.dist_context, context.model, context.stage)

    def prepare_export_model_stage(self, context: PrepareExportModelStageContext) -> PrepareExportModelStageResult:
        mapper = mapper_to_huggingface_qwen3_moe_for_causal_lm(PARAMS, FORMAT)
        return PrepareExportModelStageResult(state_mapper=mapper)


CONFIG = TrainerConfig.model_validate(
    {
        "run": {"name": "finetune-hf"},
        "schedule": {"total_steps": NUM_STEPS},
        "model_stage_factory": {"source_checkpoint": str(SOURCE)},
        "determinism": {"base_seed": 0},
        "gradient_clipping": {"max_norm": 1.0},
        "logging": {"period_steps": 10, "tracker": {"provider": "null"}},
        "checkpointing": {"save_dir": str(RUNS / "checkpoints"), "period_steps": "disable"},
        "gc": {"period_steps": 50},
    }
)
LR_SCHEDULE = {
    "initial_multiplier": 1.0,
    "phases": [{"mode": "rest", "target_multiplier": 0.1, "curve": {"type": "linear"}}],
}


# Mean loss of a model of `transformers` over the first batch.
@torch.no_grad()
def loss_of(model: torch.nn.Module) -> float:
    ids = torch.stack([Counting()[index] for index in range(BATCH)])
    logits = model.eval()(ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


def load_by_transformers(folder: Path) -> torch.nn.Module:
    model, info = Qwen3MoeForCausalLM.from_pretrained(folder, output_loading_info=True)
    if any(info.values()):
        raise RuntimeError(f"transformers misses or does not know tensors of {folder}: {info}")
    return model


# All ranks build the trainer when the checkpoint is there.
def build_trainer(provider: ModelProvider, config: TrainerConfig) -> Trainer:
    mesh = DeviceMeshParameters(data_parallel_shard=2, expert_parallel=2)
    if os.environ["RANK"] == "0" and not SOURCE.exists():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(HF_CONFIG).save_pretrained(SOURCE)
    dist.init_process_group("gloo")
    dist.barrier()
    data = AutoDataConfig(global_batch_size=BATCH, microbatch_size=4, num_workers=0, pin_memory=False)
    optimizer = TypeAdapter(AutoOptimizerConfig).validate_python({"name": "adamw", "lr": 0.02})
    lr_scheduler = TypeAdapter(AutoLRSchedulerConfig).validate_python({"name": "piecewise", "scheduler": LR_SCHEDULE})
    return TrainingConfigurator(
        mesh=mesh,
        parameters=config,
        task_provider=lambda ctx: Task(),
        model_provider=provider,
        data_provider=AutoDataProvider(
            lambda dist_context: Counting(), lambda samples: torch.stack(list(samples)), data
        ),
        optimizer_provider=AutoOptimizerProvider(optimizer),
        lr_scheduler_provider=AutoLRSchedulerProvider(lr_scheduler),
    ).configure()


def main() -> None:
    trainer = build_trainer(Provider(), CONFIG)
    trainer.train()
    trainer.export(TUNED, load_checkpoint=False)
    if os.environ["RANK"] == "0":
        HF_CONFIG.save_pretrained(TUNED)
        before, after = (loss_of(load_by_transformers(folder)) for folder in (SOURCE, TUNED))
        print(f"loss by transformers: {before:.4f} of the source, {after:.4f} of {TUNED}")


if __name__ == "__main__":
    main()
