"""DeepSeek-V3, without the modules that predict several tokens."""

from typing import Final

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from d9d.core.config import Config
from d9d.module.block.attention import MultiHeadLatentAttention
from d9d.module.block.ffn import SwiGLU
from d9d.module.block.hidden_states_aggregator import HiddenStatesAggregationMode
from d9d.module.block.moe import (
    ExpertGroupLimit,
    MoELayer,
    RouterScoring,
    RoutingParameters,
    SharedExpertParameters,
)
from d9d.module.block.positional import RotaryEmbeddingStyle
from d9d.module.block.positional.scaling import yarn_mscale
from d9d.module.model.decoder import Decoder, DecoderLayer
from d9d.module.model.parameters import DecoderParameters, SharedCounts, YarnRopeScalingConfig
from d9d.module.recompute import SelectiveCheckpointing
from d9d.pipelining.api import PipelineStageInfo

__all__ = ["DeepSeekV3Layer", "DeepSeekV3LayerParameters", "DeepSeekV3Model", "DeepSeekV3Parameters"]

_LATENT_NORM_EPS: Final = 1e-6
"""Of the norms of latent vectors, whatever the others have: so it is in the published code."""


class DeepSeekV3LayerParameters(Config):
    """Describes a layer."""

    hidden_size: PositiveInt
    """Size of a token's vector."""
    intermediate_size: PositiveInt
    """Width between the projections of the feed-forward network, in layers without experts."""
    rms_norm_eps: PositiveFloat
    """Epsilon of all norms but those of latent vectors."""
    num_attention_heads: PositiveInt
    """Number of heads."""
    q_lora_rank: PositiveInt | None
    """Size of the latent vector of queries; None for a plain projection."""
    kv_lora_rank: PositiveInt
    """Size of the latent vector of keys and values."""
    qk_nope_head_dim: PositiveInt
    """Dimensions of a head's queries and keys that are not rotated."""
    qk_rope_head_dim: PositiveInt
    """Those that are; even."""
    v_head_dim: PositiveInt
    """Dimensions of a head's values."""
    rope_style: RotaryEmbeddingStyle = RotaryEmbeddingStyle.INTERLEAVED
    """Which dimensions form pairs; as published."""
    expert_intermediate_size: PositiveInt
    """Width between the projections of an expert."""
    num_experts: PositiveInt
    """Number of experts that the router chooses from."""
    experts_top_k: PositiveInt
    """Number of experts of a token."""
    num_shared_experts: PositiveInt
    """How many experts wide the expert of all tokens is."""
    num_expert_groups: PositiveInt
    """Number of groups of experts, see `ExpertGroupLimit`."""
    num_selected_expert_groups: PositiveInt
    """From how many of them a token chooses."""
    router_scaling_factor: PositiveFloat
    """Factor on the weights of a token's experts."""
    router_renormalize_probabilities: bool = True
    """Whether the weights of a token's experts are divided by their sum, as published."""


class DeepSeekV3Parameters(DecoderParameters):
    """Describes a model."""

    layer: DeepSeekV3LayerParameters
    """Its layers."""
    num_dense_layers: NonNegativeInt
    """How many of the first layers have no experts."""

    def shared_counts(self) -> SharedCounts:
        """Return the numbers of heads, each of which has a key and a value of its own, and experts."""
        has_experts = self.num_dense_layers < self.num_hidden_layers
        return SharedCounts(
            num_heads=self.layer.num_attention_heads,
            num_kv_heads=self.layer.num_attention_heads,
            num_experts=self.layer.num_experts if has_experts else None,
        )


class DeepSeekV3Layer(DecoderLayer):
    """A layer of DeepSeek-V3: multi-head latent attention, and experts or a SwiGLU.

    Args:
        params: The whole model.
        index: Which of its layers this is.
    """

    def __init__(self, params: DeepSeekV3Parameters, index: int) -> None:
        layer = params.layer
        super().__init__(
            layer.hidden_size,
            layer.rms_norm_eps,
            _build_attention(params),
            SwiGLU(layer.hidden_size, layer.intermediate_size)
            if index < params.num_dense_layers
            else _build_mixture(layer),
        )


class DeepSeekV3Model(Decoder):
    """One stage of DeepSeek-V3 without heads.

    Routers have a bias per expert, which no gradient moves, see `TopKRouter`.

    Source:
        https://arxiv.org/abs/2412.19437

    Args:
        params: The whole model.
        stage: Which part of it this is.
        hidden_states_snapshot_mode: What is kept of the outputs of each layer.
        enable_checkpointing: Whether layers are computed again for their backward pass, instead of keeping activations; or
            what of these is kept.
    """

    def __init__(
        self,
        params: DeepSeekV3Parameters,
        stage: PipelineStageInfo,
        hidden_states_snapshot_mode: HiddenStatesAggregationMode,
        enable_checkpointing: bool | SelectiveCheckpointing,
    ) -> None:
        super().__init__(
            params,
            stage,
            hidden_states_snapshot_mode,
            enable_checkpointing,
            hidden_size=params.layer.hidden_size,
            norm_eps=params.layer.rms_norm_eps,
            rope_dim=params.layer.qk_rope_head_dim,
            rope_style=params.layer.rope_style,
            build_layer=lambda index: DeepSeekV3Layer(params, index),
        )


def _build_attention(params: DeepSeekV3Parameters) -> MultiHeadLatentAttention:
    layer, scaling = params.layer, params.rope_scaling
    softmax_scale = (layer.qk_nope_head_dim + layer.qk_rope_head_dim) ** -0.5
    if isinstance(scaling, YarnRopeScalingConfig) and scaling.mscale_all_dim:
        # The dimensions that are not rotated have no cosines to take the factor on.
        softmax_scale *= yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return MultiHeadLatentAttention(
        layer.hidden_size,
        layer.num_attention_heads,
        layer.qk_nope_head_dim,
        layer.qk_rope_head_dim,
        layer.v_head_dim,
        layer.kv_lora_rank,
        layer.q_lora_rank,
        _LATENT_NORM_EPS,
        is_causal=True,
        rope_style=layer.rope_style,
        softmax_scale=softmax_scale,
    )


def _build_mixture(layer: DeepSeekV3LayerParameters) -> MoELayer:
    return MoELayer(
        layer.hidden_size,
        layer.expert_intermediate_size,
        layer.num_experts,
        layer.experts_top_k,
        layer.router_renormalize_probabilities,
        SharedExpertParameters(
            intermediate_size=layer.num_shared_experts * layer.expert_intermediate_size, enable_gate=False
        ),
        enable_expert_bias=True,
        routing=RoutingParameters(
            scoring=RouterScoring.sigmoid,
            group_limit=ExpertGroupLimit(
                num_groups=layer.num_expert_groups, num_selected_groups=layer.num_selected_expert_groups
            ),
            scaling_factor=layer.router_scaling_factor,
            has_wide_logits=True,
        ),
    )
