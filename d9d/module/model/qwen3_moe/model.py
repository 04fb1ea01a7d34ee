"""Qwen3 with mixtures of experts."""

from pydantic import PositiveInt

from d9d.module.block.hidden_states_aggregator import HiddenStatesAggregationMode
from d9d.module.block.moe import MoELayer
from d9d.module.block.positional import RotaryEmbeddingStyle
from d9d.module.model.decoder import Decoder, DecoderLayer, build_grouped_query_attention
from d9d.module.model.parameters import DecoderParameters, GroupedQueryLayerParameters, SharedCounts
from d9d.module.recompute import SelectiveCheckpointing
from d9d.pipelining.api import PipelineStageInfo

__all__ = ["Qwen3MoELayer", "Qwen3MoELayerParameters", "Qwen3MoEModel", "Qwen3MoEParameters"]

_ROPE_STYLE = RotaryEmbeddingStyle.HALF


class Qwen3MoELayerParameters(GroupedQueryLayerParameters):
    """Describes a layer."""

    intermediate_size: PositiveInt
    """Width between the projections of an expert."""
    num_experts: PositiveInt
    """Number of experts."""
    experts_top_k: PositiveInt
    """Number of experts of a token."""
    router_renormalize_probabilities: bool = True
    """Whether the probabilities of a token's experts are divided by their sum, as in all published models."""


class Qwen3MoEParameters(DecoderParameters):
    """Describes a model."""

    layer: Qwen3MoELayerParameters
    """Its layers, which are all alike."""

    def shared_counts(self) -> SharedCounts:
        """Return the numbers of heads and experts."""
        return SharedCounts(
            num_heads=self.layer.num_attention_heads,
            num_kv_heads=self.layer.num_key_value_heads,
            num_experts=self.layer.num_experts,
        )


class Qwen3MoELayer(DecoderLayer):
    """A layer of Qwen3-MoE: grouped-query attention with norms of queries and keys, and experts.

    Args:
        params: Its sizes.
    """

    def __init__(self, params: Qwen3MoELayerParameters) -> None:
        super().__init__(
            params.hidden_size,
            params.rms_norm_eps,
            build_grouped_query_attention(params, _ROPE_STYLE, has_query_key_norms=True),
            MoELayer(
                params.hidden_size,
                params.intermediate_size,
                params.num_experts,
                params.experts_top_k,
                params.router_renormalize_probabilities,
            ),
        )


class Qwen3MoEModel(Decoder):
    """One stage of Qwen3-MoE without heads.

    Source:
        https://arxiv.org/abs/2505.09388

    Args:
        params: The whole model.
        stage: Which part of it this is.
        hidden_states_snapshot_mode: What is kept of the outputs of each layer.
        enable_checkpointing: Whether layers are computed again for their backward pass, instead of keeping activations; or
            what of these is kept.
    """

    def __init__(
        self,
        params: Qwen3MoEParameters,
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
            rope_dim=params.layer.head_dim,
            rope_style=_ROPE_STYLE,
            build_layer=lambda _: Qwen3MoELayer(params.layer),
        )
