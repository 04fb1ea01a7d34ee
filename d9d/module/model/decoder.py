"""The decoder that all models share: embeddings, layers, a norm, and which of them a pipeline stage has.

Axes: B sequences, T tokens, H hidden size, L layers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Self, cast

import torch
from torch import nn

from d9d.core.types import TensorSpec
from d9d.module.base import ModuleLateInit
from d9d.module.block.attention import GroupedQueryAttention, MultiHeadLatentAttention
from d9d.module.block.embedding import SplitTokenEmbeddings
from d9d.module.block.ffn import SwiGLU
from d9d.module.block.head import TokenMean
from d9d.module.block.hidden_states_aggregator import HiddenStatesAggregationMode, create_hidden_states_aggregator
from d9d.module.block.moe import MoELayer
from d9d.module.block.normalization import RMSNorm
from d9d.module.block.positional import RotaryEmbeddingProvider, RotaryEmbeddingStyle
from d9d.module.model.io import SequenceInput, SequenceShared, SequenceTransfer
from d9d.module.model.parameters import DecoderParameters, GroupedQueryLayerParameters, build_rope_scaling
from d9d.module.recompute import SelectiveCheckpointing, checkpoint_blocks
from d9d.pipelining.api import (
    ModuleSupportsPipelining,
    PipelineStageInfo,
    StageBoundary,
    distribute_layers_for_pipeline_stage,
)

__all__ = ["Decoder", "DecoderBackbone", "DecoderLayer", "build_grouped_query_attention", "layers_of_stage"]


class DecoderBackbone(
    ModuleLateInit,
    ModuleSupportsPipelining[
        SequenceInput, SequenceTransfer[torch.Tensor], SequenceShared, SequenceTransfer[torch.Tensor]
    ],
    Protocol,
):
    """What heads can be put on: one stage of a decoder without heads."""

    @property
    def hidden_size(self) -> int:
        """H."""
        ...

    @property
    def split_vocab_size(self) -> Mapping[str, int]:
        """Number of tokens of each vocabulary."""
        ...

    @property
    def split_vocab_order(self) -> Sequence[str]:
        """Names of the vocabularies, in the order of token ids."""
        ...

    def __call__(
        self, inputs: SequenceInput | SequenceTransfer[torch.Tensor], shared: SequenceShared
    ) -> SequenceTransfer[torch.Tensor]:
        """Run the stage."""
        ...

    def stage_transfer_spec(
        self, pipeline_input: SequenceInput, boundary: StageBoundary
    ) -> SequenceTransfer[TensorSpec]:
        """Describe what crosses a boundary of the stage."""
        ...


class DecoderLayer(nn.Module, ModuleLateInit):
    """Attention and a feed-forward network, each behind a norm and added to its input.

    Args:
        hidden_size: H.
        norm_eps: Epsilon of both norms.
        attention: Lets tokens see each other.
        feed_forward: Is applied to each token.
    """

    def __init__(
        self,
        hidden_size: int,
        norm_eps: float,
        attention: GroupedQueryAttention | MultiHeadLatentAttention,
        feed_forward: SwiGLU | MoELayer,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden_size, norm_eps)
        self.mlp = feed_forward

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        token_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Apply the layer.

        Shapes:
            Hidden states ``(B, T, H)``, as the result.

        Args:
            hidden_states: Tokens.
            position_embeddings: Cosines and sines, see `RotaryEmbeddingProvider`.
            attention_mask: As in `SequenceShared`.
            token_mask: As in `SequenceShared`.
        """
        hidden_states = hidden_states + self.self_attn(
            self.input_layernorm(hidden_states), attention_mask, position_embeddings
        )
        normalised = self.post_attention_layernorm(hidden_states)
        is_mixture = isinstance(self.mlp, MoELayer)
        return hidden_states + (self.mlp(normalised, token_mask) if is_mixture else self.mlp(normalised))

    def reset_parameters(self) -> None:
        """Initialise both blocks and both norms."""
        self.input_layernorm.reset_parameters()
        self.self_attn.reset_parameters()
        self.post_attention_layernorm.reset_parameters()
        self.mlp.reset_parameters()


def build_grouped_query_attention(
    params: GroupedQueryLayerParameters, rope_style: RotaryEmbeddingStyle, *, has_query_key_norms: bool
) -> GroupedQueryAttention:
    """Build causal attention of a layer.

    Args:
        params: Its sizes.
        rope_style: Which dimensions of a head form pairs.
        has_query_key_norms: Whether queries and keys of each head are normalised.
    """
    return GroupedQueryAttention(
        params.hidden_size,
        params.num_attention_heads,
        params.num_key_value_heads,
        params.head_dim,
        params.rms_norm_eps if has_query_key_norms else None,
        is_causal=True,
        rope_style=rope_style,
    )


def layers_of_stage(params: DecoderParameters, stage: PipelineStageInfo) -> range:
    """Return the indices of the layers that a stage has."""
    start, end = distribute_layers_for_pipeline_stage(
        params.num_hidden_layers,
        params.pipeline_num_virtual_layers_pre,
        params.pipeline_num_virtual_layers_post,
        stage,
    )
    return range(start, end)


class Decoder(nn.Module, ModuleLateInit):
    """One stage of a stack of layers that predicts from what came before. Models say what their layers are.

    The first stage has the embeddings, the last one the norm behind the layers. Layers are named by their index in the
    whole model, so that names, and initial values, do not depend on how it is cut.

    Args:
        params: The model, but for its layers.
        stage: Which part of it this is.
        hidden_states_snapshot_mode: What is kept of the outputs of each layer.
        enable_checkpointing: Whether layers are computed again for their backward pass, instead of keeping activations; or
            what of these is kept.
        hidden_size: H.
        norm_eps: Epsilon of the last norm.
        rope_dim: Number of dimensions of a head that are rotated.
        rope_style: Which of them form pairs.
        build_layer: Builds the layer of an index.
    """

    def __init__(
        self,
        params: DecoderParameters,
        stage: PipelineStageInfo,
        hidden_states_snapshot_mode: HiddenStatesAggregationMode,
        enable_checkpointing: bool | SelectiveCheckpointing,
        *,
        hidden_size: int,
        norm_eps: float,
        rope_dim: int,
        rope_style: RotaryEmbeddingStyle,
        build_layer: Callable[[int], DecoderLayer],
    ) -> None:
        super().__init__()
        self._params = params
        self._stage = stage
        self._snapshot_mode = hidden_states_snapshot_mode
        self._hidden_size = hidden_size
        self._token_parts = 1
        self._layer_range = layers_of_stage(params, stage)
        self.embed_tokens = (
            SplitTokenEmbeddings(params.split_vocab_size, params.split_vocab_order, hidden_size)
            if stage.is_current_stage_first
            else None
        )
        self.rope = RotaryEmbeddingProvider(
            params.rope_base, rope_dim, params.max_position_ids, rope_style, build_rope_scaling(params.rope_scaling)
        )
        self.layers = nn.ModuleDict({str(index): build_layer(index) for index in self._layer_range})
        self.norm = RMSNorm(hidden_size, norm_eps) if stage.is_current_stage_last else None
        self.token_mean = TokenMean() if hidden_states_snapshot_mode != HiddenStatesAggregationMode.no else None
        if enable_checkpointing is not False:
            checkpoint_blocks(self.layers.values(), None if enable_checkpointing is True else enable_checkpointing)
        self._dtype = next(self.parameters()).dtype

    @property
    def stage(self) -> PipelineStageInfo:
        """Which part of the model this is."""
        return self._stage

    @property
    def hidden_size(self) -> int:
        """H."""
        return self._hidden_size

    @property
    def split_vocab_size(self) -> Mapping[str, int]:
        """Number of tokens of each vocabulary."""
        return self._params.split_vocab_size

    @property
    def split_vocab_order(self) -> Sequence[str]:
        """Names of the vocabularies, in the order of token ids."""
        return self._params.split_vocab_order

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether a language modelling head is to have the weights of the embeddings."""
        return self._params.tie_word_embeddings

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """The layers of the stage, in their order."""
        return [cast("DecoderLayer", layer) for layer in self.layers.values()]

    def output_dtype(self) -> torch.dtype:
        """Return the dtype of what the stage hands on, which is that of its parameters.

        Under FSDP that of the shards, also while a unit is gathered in another one.
        """
        return self._dtype

    def use_token_parts(self, num_parts: int) -> None:
        """Take note that ranks hand on parts of the tokens, as sequence parallelism does.

        Args:
            num_parts: Number of ranks that a sequence is cut over.

        Raises:
            NotImplementedError: If hidden states are kept, whose means would be those of parts.
        """
        if num_parts > 1 and self.token_mean is not None:
            raise NotImplementedError(
                f"hidden_states_snapshot_mode={self._snapshot_mode.value!r} needs all tokens of a sequence on each rank. "
                "Do without sequence parallelism, or use mode 'no'."
            )
        self._token_parts = num_parts

    def forward(
        self, inputs: SequenceInput | SequenceTransfer[torch.Tensor], shared: SequenceShared
    ) -> SequenceTransfer[torch.Tensor]:
        """Run the stage.

        Args:
            inputs: Token ids in the first stage, what the stage before hands on in the others.
            shared: What all stages need.

        Raises:
            TypeError: If inputs are not those of this stage.
        """
        hidden_states, snapshot = self._enter(inputs)
        position_embeddings = self.rope(shared.position_ids)
        aggregator = create_hidden_states_aggregator(
            self._snapshot_mode, shared.hidden_states_agg_mask, self.token_mean
        )
        for layer in self.layers.values():
            hidden_states = layer(hidden_states, position_embeddings, shared.attention_mask, shared.token_mask)
            aggregator.add_hidden_states(hidden_states)
        if self.norm is not None:
            hidden_states = self.norm(hidden_states)
        return SequenceTransfer(
            hidden_states=hidden_states, hidden_states_snapshot=aggregator.pack_with_snapshot(snapshot)
        )

    def _enter(
        self, inputs: SequenceInput | SequenceTransfer[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.embed_tokens is not None and isinstance(inputs, SequenceInput):
            return self.embed_tokens(inputs.input_ids), None
        if self.embed_tokens is None and isinstance(inputs, SequenceTransfer):
            return inputs.hidden_states, inputs.hidden_states_snapshot
        expected = "SequenceInput" if self.embed_tokens is not None else "SequenceTransfer"
        raise TypeError(
            f"stage {self._stage.current_stage} of {self._stage.num_stages} takes a {expected}, not a "
            f"{type(inputs).__name__}. The first stage takes token ids, the others what the stage before returns."
        )

    def reset_parameters(self) -> None:
        """Initialise everything that the stage has."""
        for part in (self.embed_tokens, self.rope, *self.decoder_layers, self.norm):
            if part is not None:
                part.reset_parameters()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # What `to`, `half`, `double` and the like call.
        super()._apply(fn, recurse)
        self._dtype = next(self.parameters()).dtype
        return self

    def stage_transfer_spec(
        self, pipeline_input: SequenceInput, boundary: StageBoundary
    ) -> SequenceTransfer[TensorSpec]:
        """Describe what crosses a boundary of the stage, as local tensors of this rank.

        Args:
            pipeline_input: Token ids of a microbatch.
            boundary: Side of the stage.

        Raises:
            ValueError: If the ranks of sequence parallelism do not divide the number of tokens.
        """
        num_sequences, num_tokens = pipeline_input.input_ids.shape
        if num_tokens % self._token_parts:
            raise ValueError(
                f"{num_tokens} tokens are to be cut into {self._token_parts} equal parts. Pad sequences to a multiple of "
                f"{self._token_parts}."
            )
        dtype = self.output_dtype()
        hidden_states = TensorSpec((num_sequences, num_tokens // self._token_parts, self._hidden_size), dtype)
        num_layers = self._layer_range.start if boundary is StageBoundary.incoming else self._layer_range.stop
        has_snapshot = self._snapshot_mode != HiddenStatesAggregationMode.no and num_layers > 0
        snapshot = TensorSpec((num_layers, num_sequences, self._hidden_size), dtype) if has_snapshot else None
        return SequenceTransfer(hidden_states=hidden_states, hidden_states_snapshot=snapshot)
