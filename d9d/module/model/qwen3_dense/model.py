"""Qwen3 with dense layers."""

from pydantic import PositiveInt

from d9d.module.block.ffn import SwiGLU
from d9d.module.block.hidden_states_aggregator import HiddenStatesAggregationMode
from d9d.module.block.positional import RotaryEmbeddingStyle
from d9d.module.model.decoder import Decoder, DecoderLayer, build_grouped_query_attention
from d9d.module.model.parameters import DecoderParameters, GroupedQueryLayerParameters, SharedCounts
from d9d.module.recompute import SelectiveCheckpointing
from d9d.pipelining.api import PipelineStageInfo

__all__ = ["Qwen3DenseLayer", "Qwen3DenseLayerParameters", "Qwen3DenseModel", "Qwen3DenseParameters"]

_ROPE_STYLE = RotaryEmbeddingStyle.HALF


class Qwen3DenseLayerParameters(GroupedQueryLayerParameters):
    """Describes a layer."""

    intermediate_size: PositiveInt
    """Width between the projections of the feed-forward network."""


class Qwen3DenseParameters(DecoderParameters):
    """Describes a model."""

    layer: Qwen3DenseLayerParameters
    """Its layers, which are all alike."""

    def shared_counts(self) -> SharedCounts:
        """Return the numbers of heads."""
        return SharedCounts(num_heads=self.layer.num_attention_heads, num_kv_heads=self.layer.num_key_value_heads)


class Qwen3DenseLayer(DecoderLayer):
    """A layer of Qwen3: grouped-query attention with norms of queries and keys, and a SwiGLU.

    Args:
        params: Its sizes.
    """

    def __init__(self, params: Qwen3DenseLayerParameters) -> None:
        super().__init__(
            params.hidden_size,
            params.rms_norm_eps,
            build_grouped_query_attention(params, _ROPE_STYLE, has_query_key_norms=True),
            SwiGLU(params.hidden_size, params.intermediate_size),
        )


class Qwen3DenseModel(Decoder):
    """One stage of Qwen3 without heads.

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
        params: Qwen3DenseParameters,
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
            build_layer=lambda _: Qwen3DenseLayer(params.layer),
        )
