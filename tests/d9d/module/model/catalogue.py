"""The models of the catalogue, one row each: a tiny one here, the same one in transformers, and the mappers between them."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from d9d.model_state.mapper import ModelStateMapper
from d9d.module.block.hidden_states_aggregator import HiddenStatesAggregationMode
from d9d.module.block.positional import RotaryEmbeddingStyle
from d9d.module.model.decoder import Decoder
from d9d.module.model.deepseek_v3 import (
    DeepSeekV3LayerParameters,
    DeepSeekV3Model,
    DeepSeekV3Parameters,
    mapper_from_huggingface_deepseek_v3,
    mapper_from_huggingface_deepseek_v3_for_causal_lm,
    mapper_from_huggingface_deepseek_v3_for_classification,
    mapper_from_huggingface_deepseek_v3_for_embedding,
    mapper_to_huggingface_deepseek_v3,
    mapper_to_huggingface_deepseek_v3_for_causal_lm,
    mapper_to_huggingface_deepseek_v3_for_classification,
    mapper_to_huggingface_deepseek_v3_for_embedding,
)
from d9d.module.model.huggingface import ExpertsFormat
from d9d.module.model.llama import (
    LlamaLayerParameters,
    LlamaModel,
    LlamaParameters,
    mapper_from_huggingface_llama,
    mapper_from_huggingface_llama_for_causal_lm,
    mapper_from_huggingface_llama_for_classification,
    mapper_from_huggingface_llama_for_embedding,
    mapper_to_huggingface_llama,
    mapper_to_huggingface_llama_for_causal_lm,
    mapper_to_huggingface_llama_for_classification,
    mapper_to_huggingface_llama_for_embedding,
)
from d9d.module.model.parameters import DecoderParameters, Llama3RopeScalingConfig, YarnRopeScalingConfig
from d9d.module.model.qwen3_dense import (
    Qwen3DenseLayerParameters,
    Qwen3DenseModel,
    Qwen3DenseParameters,
    mapper_from_huggingface_qwen3_dense,
    mapper_from_huggingface_qwen3_dense_for_causal_lm,
    mapper_from_huggingface_qwen3_dense_for_classification,
    mapper_from_huggingface_qwen3_dense_for_embedding,
    mapper_to_huggingface_qwen3_dense,
    mapper_to_huggingface_qwen3_dense_for_causal_lm,
    mapper_to_huggingface_qwen3_dense_for_classification,
    mapper_to_huggingface_qwen3_dense_for_embedding,
)
from d9d.module.model.qwen3_moe import (
    Qwen3MoEExpertsFormat,
    Qwen3MoELayerParameters,
    Qwen3MoEModel,
    Qwen3MoEParameters,
    mapper_from_huggingface_qwen3_moe,
    mapper_from_huggingface_qwen3_moe_for_causal_lm,
    mapper_from_huggingface_qwen3_moe_for_classification,
    mapper_from_huggingface_qwen3_moe_for_embedding,
    mapper_to_huggingface_qwen3_moe,
    mapper_to_huggingface_qwen3_moe_for_causal_lm,
    mapper_to_huggingface_qwen3_moe_for_classification,
    mapper_to_huggingface_qwen3_moe_for_embedding,
)
from d9d.pipelining.api import PipelineStageInfo

VOCAB = {"regular": 29, "added": 4}
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MAX_POSITIONS = 16, 2, 4, 2, 8, 32
COMMON = {
    "num_hidden_layers": LAYERS,
    "rope_base": 10000,
    "max_position_ids": MAX_POSITIONS,
    "split_vocab_size": VOCAB,
    "split_vocab_order": list(VOCAB),
    "pipeline_num_virtual_layers_pre": 1,
    "pipeline_num_virtual_layers_post": 1,
}
HF_COMMON = {
    "vocab_size": sum(VOCAB.values()),
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-6,
    "use_cache": False,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SIZES = {
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "head_dim": HEAD_DIM,
}


@dataclass(frozen=True, kw_only=True)
class Mappers:
    """From and to Hugging Face, of a model with one kind of head, or none."""

    load: Callable[..., ModelStateMapper]
    export: Callable[..., ModelStateMapper]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One family."""

    model: type[Decoder]
    params: Callable[[bool], DecoderParameters]
    """Whether embeddings are tied -> the model."""
    family: str
    """Module of transformers."""
    prefix: str
    """What its classes begin with."""
    config: dict[str, Any]
    """What its config has beside `HF_COMMON`."""
    backbone: Mappers
    causal_lm: Mappers
    classification: Mappers | None
    """None where transformers has no such class."""
    embedding: Mappers
    formats: tuple[Any, ...] = ()
    """Further argument of the mappers: the first is for files, the last for modules in memory."""

    def mapper(self, make: Callable[..., ModelStateMapper], tied: bool, *, in_memory: bool = False, **kwargs: Any):
        return make(self.params(tied), *self.formats[-1:] if in_memory else self.formats[:1], **kwargs)

    def build(
        self, tied: bool, stage: PipelineStageInfo | None = None, *, checkpointed: bool = False, mode: str = "no"
    ):
        return self.model(
            self.params(tied), stage or PipelineStageInfo(0, 1), HiddenStatesAggregationMode(mode), checkpointed
        )

    def build_theirs(self, kind: str, tied: bool, **config: Any) -> nn.Module:
        """Build a model of transformers, `kind` being the rest of its class's name."""
        module = self.theirs()
        settings = {**HF_COMMON, **self.config, "tie_word_embeddings": tied, **config}
        model = getattr(module, f"{self.prefix}{kind}")(getattr(module, f"{self.prefix}Config")(**settings))
        return model.eval()

    def theirs(self) -> Any:
        return importlib.import_module(f"transformers.models.{self.family}.modeling_{self.family}")


CATALOGUE = {
    "qwen3 dense": Row(
        model=Qwen3DenseModel,
        params=lambda tied: Qwen3DenseParameters(
            **COMMON, tie_word_embeddings=tied, layer=Qwen3DenseLayerParameters(**SIZES, intermediate_size=20)
        ),
        family="qwen3",
        prefix="Qwen3",
        config={"intermediate_size": 20, "head_dim": HEAD_DIM},
        backbone=Mappers(load=mapper_from_huggingface_qwen3_dense, export=mapper_to_huggingface_qwen3_dense),
        causal_lm=Mappers(
            load=mapper_from_huggingface_qwen3_dense_for_causal_lm,
            export=mapper_to_huggingface_qwen3_dense_for_causal_lm,
        ),
        classification=Mappers(
            load=mapper_from_huggingface_qwen3_dense_for_classification,
            export=mapper_to_huggingface_qwen3_dense_for_classification,
        ),
        embedding=Mappers(
            load=mapper_from_huggingface_qwen3_dense_for_embedding,
            export=mapper_to_huggingface_qwen3_dense_for_embedding,
        ),
    ),
    "qwen3 moe": Row(
        model=Qwen3MoEModel,
        params=lambda tied: Qwen3MoEParameters(
            **COMMON,
            tie_word_embeddings=tied,
            layer=Qwen3MoELayerParameters(**SIZES, intermediate_size=12, num_experts=4, experts_top_k=2),
        ),
        family="qwen3_moe",
        prefix="Qwen3Moe",
        config={
            "moe_intermediate_size": 12,
            "head_dim": HEAD_DIM,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        backbone=Mappers(load=mapper_from_huggingface_qwen3_moe, export=mapper_to_huggingface_qwen3_moe),
        causal_lm=Mappers(
            load=mapper_from_huggingface_qwen3_moe_for_causal_lm, export=mapper_to_huggingface_qwen3_moe_for_causal_lm
        ),
        classification=Mappers(
            load=mapper_from_huggingface_qwen3_moe_for_classification,
            export=mapper_to_huggingface_qwen3_moe_for_classification,
        ),
        embedding=Mappers(
            load=mapper_from_huggingface_qwen3_moe_for_embedding, export=mapper_to_huggingface_qwen3_moe_for_embedding
        ),
        formats=(Qwen3MoEExpertsFormat.MODULE_LIST, Qwen3MoEExpertsFormat.FUSED),
    ),
}

CATALOGUE["llama"] = Row(
    model=LlamaModel,
    params=lambda tied: LlamaParameters(
        **COMMON,
        tie_word_embeddings=tied,
        rope_scaling=Llama3RopeScalingConfig(factor=8.0, original_max_position_embeddings=16),
        layer=LlamaLayerParameters(**SIZES, intermediate_size=20),
    ),
    family="llama",
    prefix="Llama",
    config={
        "intermediate_size": 20,
        "head_dim": HEAD_DIM,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    backbone=Mappers(load=mapper_from_huggingface_llama, export=mapper_to_huggingface_llama),
    causal_lm=Mappers(
        load=mapper_from_huggingface_llama_for_causal_lm, export=mapper_to_huggingface_llama_for_causal_lm
    ),
    classification=Mappers(
        load=mapper_from_huggingface_llama_for_classification, export=mapper_to_huggingface_llama_for_classification
    ),
    embedding=Mappers(
        load=mapper_from_huggingface_llama_for_embedding, export=mapper_to_huggingface_llama_for_embedding
    ),
)


def deepseek_v3(q_lora_rank: int | None, rope_style: RotaryEmbeddingStyle) -> Row:
    """Its first layer is dense. Queries with and without a latent vector; pairs of neighbours, and of halves."""
    layer = DeepSeekV3LayerParameters(
        hidden_size=HIDDEN,
        intermediate_size=20,
        rms_norm_eps=1e-5,
        num_attention_heads=HEADS,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=6,
        qk_nope_head_dim=4,
        qk_rope_head_dim=8,
        v_head_dim=6,
        rope_style=rope_style,
        expert_intermediate_size=6,
        num_experts=8,
        experts_top_k=3,
        num_shared_experts=2,
        num_expert_groups=4,
        num_selected_expert_groups=2,
        router_scaling_factor=2.5,
    )
    yarn = {
        "factor": 2.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    }
    return Row(
        model=DeepSeekV3Model,
        params=lambda tied: DeepSeekV3Parameters(
            **COMMON,
            tie_word_embeddings=tied,
            rope_scaling=YarnRopeScalingConfig(**yarn),
            num_dense_layers=1,
            layer=layer,
        ),
        family="deepseek_v3",
        prefix="DeepseekV3",
        config={
            "intermediate_size": 20,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": HEADS,
            "q_lora_rank": q_lora_rank,
            "kv_lora_rank": 6,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 8,
            "v_head_dim": 6,
            "rope_interleave": rope_style == RotaryEmbeddingStyle.INTERLEAVED,
            "moe_intermediate_size": 6,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, **yarn},
        },
        backbone=Mappers(load=mapper_from_huggingface_deepseek_v3, export=mapper_to_huggingface_deepseek_v3),
        causal_lm=Mappers(
            load=mapper_from_huggingface_deepseek_v3_for_causal_lm,
            export=mapper_to_huggingface_deepseek_v3_for_causal_lm,
        ),
        classification=Mappers(
            load=mapper_from_huggingface_deepseek_v3_for_classification,
            export=mapper_to_huggingface_deepseek_v3_for_classification,
        ),
        embedding=Mappers(
            load=mapper_from_huggingface_deepseek_v3_for_embedding,
            export=mapper_to_huggingface_deepseek_v3_for_embedding,
        ),
        formats=(ExpertsFormat.MODULE_LIST, ExpertsFormat.FUSED),
    )


CATALOGUE["deepseek v3"] = deepseek_v3(8, RotaryEmbeddingStyle.INTERLEAVED)
VARIANTS = {"deepseek v3, plain queries": deepseek_v3(None, RotaryEmbeddingStyle.HALF)}
"""Further models whose weights have other names, for comparisons with transformers."""


def tokens(num_sequences: int = 2, num_tokens: int = 8, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, sum(VOCAB.values()), (num_sequences, num_tokens), generator=generator)
