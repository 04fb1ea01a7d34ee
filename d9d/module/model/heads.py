"""Decoders with heads: one head, or several by name. Heads are in the last stage."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Generic, Literal, TypeAlias, TypeVar, cast

import torch
from pydantic import ConfigDict, Field, PositiveInt
from torch import nn

from d9d.core.config import Config
from d9d.core.types import TensorSpec
from d9d.module.base import ModuleLateInit
from d9d.module.block.head import (
    ClassificationHead,
    EmbeddingHead,
    SequenceCausalLMHeadShared,
    SequenceCausalLMOutput,
    SequenceClassificationOutput,
    SequenceEmbeddingOutput,
    SequencePoolingHeadShared,
    SplitLanguageModellingHead,
    TaskHead,
)
from d9d.module.block.head.base import THeadOutput, THeadShared
from d9d.module.model.decoder import Decoder, DecoderBackbone
from d9d.module.model.io import (
    SequenceHeadShared,
    SequenceHeadsOutput,
    SequenceHeadsShared,
    SequenceInput,
    SequenceTransfer,
)
from d9d.pipelining.api import PipelineStageInfo, StageBoundary

__all__ = [
    "SINGLE_HEAD_PREFIX",
    "AnyHeadConfig",
    "CausalLMHeadConfig",
    "ClassificationHeadConfig",
    "DecoderForCausalLM",
    "DecoderForClassification",
    "DecoderForEmbedding",
    "DecoderWithHead",
    "DecoderWithHeads",
    "EmbeddingHeadConfig",
    "build_decoder_head",
]

TBackbone = TypeVar("TBackbone", bound=DecoderBackbone)
# Any: a bound can not say that the parameters of a head are those of the decoder.
THead = TypeVar("THead", bound=TaskHead[Any, Any])

SINGLE_HEAD_PREFIX: Final = "head."
"""What names of parameters of the head begin with, where there is one. Of several, they begin with ``heads.<name>.``"""


class CausalLMHeadConfig(Config):
    """Predicts tokens."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["causal_lm"] = "causal_lm"


class ClassificationHeadConfig(Config):
    """Scores labels."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["classification"] = "classification"
    num_labels: PositiveInt
    """Number of scores."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Probability with which a pooled value is dropped in training; by default none is, as in Hugging Face's models."""


class EmbeddingHeadConfig(Config):
    """Gives vectors."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["embedding"] = "embedding"
    embedding_dim: PositiveInt | None = None
    """Size of the vectors; by default that of hidden states, without a layer."""
    normalize: bool = False
    """Whether vectors are scaled to length one."""


AnyHeadConfig: TypeAlias = Annotated[
    CausalLMHeadConfig | ClassificationHeadConfig | EmbeddingHeadConfig, Field(discriminator="kind")
]
"""Which head a decoder has."""


# Any: which head it is follows from the config, at run time.
def build_decoder_head(config: AnyHeadConfig, *, backbone: DecoderBackbone) -> TaskHead[Any, Any]:
    """Build the head that a config names, with the sizes of a decoder."""
    match config:
        case CausalLMHeadConfig():
            return SplitLanguageModellingHead(
                backbone.split_vocab_size, backbone.split_vocab_order, backbone.hidden_size
            )
        case ClassificationHeadConfig():
            return ClassificationHead(backbone.hidden_size, config.num_labels, config.dropout)
        case EmbeddingHeadConfig():
            return EmbeddingHead(backbone.hidden_size, config.embedding_dim, config.normalize)


class DecoderWithHead(nn.Module, ModuleLateInit, Generic[TBackbone, THead, THeadShared, THeadOutput]):
    """One stage of a decoder and its head. Only the last stage keeps the head.

    If the decoder ties embeddings and the head predicts tokens, the head has the weights of the embeddings: the same
    parameters where one stage has both, else copies that the pipeline keeps equal (`tied_parameters`).

    Args:
        backbone: The stage of the decoder.
        head: The head.
        stage: Which part of the model this is.
    """

    def __init__(self, backbone: TBackbone, head: THead, stage: PipelineStageInfo) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head if stage.is_current_stage_last else None
        self._is_tied = _share_embeddings(backbone, [head])

    def forward(
        self, inputs: SequenceInput | SequenceTransfer[torch.Tensor], shared: SequenceHeadShared[THeadShared]
    ) -> SequenceTransfer[torch.Tensor] | THeadOutput:
        """Run the stage: what the head gives in the last one, what the next stage takes in the others."""
        transfer = self.backbone(inputs, shared.sequence)
        return transfer if self.head is None else self.head(transfer.hidden_states, shared.head)

    def reset_parameters(self) -> None:
        """Initialise the decoder and the head."""
        self.backbone.reset_parameters()
        if self.head is not None:
            self.head.reset_parameters()

    def stage_transfer_spec(
        self, pipeline_input: SequenceInput, boundary: StageBoundary
    ) -> SequenceTransfer[TensorSpec]:
        """Describe what crosses a boundary of the stage."""
        return self.backbone.stage_transfer_spec(pipeline_input, boundary)

    def tied_parameters(self) -> dict[str, str]:
        """Name the weights of this stage that embeddings and head share; empty if they share none."""
        return _tied_names(self.backbone, {SINGLE_HEAD_PREFIX: self.head}) if self._is_tied else {}


class DecoderForCausalLM(
    DecoderWithHead[TBackbone, SplitLanguageModellingHead, SequenceCausalLMHeadShared, SequenceCausalLMOutput]
):
    """One stage of a decoder that predicts tokens.

    Args:
        backbone: The stage of the decoder.
        stage: Which part of the model this is.
    """

    def __init__(self, backbone: TBackbone, stage: PipelineStageInfo) -> None:
        head = build_decoder_head(CausalLMHeadConfig(), backbone=backbone)
        super().__init__(backbone, cast("SplitLanguageModellingHead", head), stage)


class DecoderForClassification(
    DecoderWithHead[TBackbone, ClassificationHead, SequencePoolingHeadShared, SequenceClassificationOutput]
):
    """One stage of a decoder that scores labels.

    Args:
        backbone: The stage of the decoder.
        config: The head.
        stage: Which part of the model this is.
    """

    def __init__(self, backbone: TBackbone, config: ClassificationHeadConfig, stage: PipelineStageInfo) -> None:
        head = build_decoder_head(config, backbone=backbone)
        super().__init__(backbone, cast("ClassificationHead", head), stage)


class DecoderForEmbedding(
    DecoderWithHead[TBackbone, EmbeddingHead, SequencePoolingHeadShared, SequenceEmbeddingOutput]
):
    """One stage of a decoder that gives vectors.

    Args:
        backbone: The stage of the decoder.
        config: The head.
        stage: Which part of the model this is.
    """

    def __init__(self, backbone: TBackbone, config: EmbeddingHeadConfig, stage: PipelineStageInfo) -> None:
        head = build_decoder_head(config, backbone=backbone)
        super().__init__(backbone, cast("EmbeddingHead", head), stage)


class DecoderWithHeads(nn.Module, ModuleLateInit, Generic[TBackbone, THeadShared, THeadOutput]):
    """One stage of a decoder and several heads, which all see the same hidden states. Only the last stage keeps heads.

    Embeddings are tied as in `DecoderWithHead`.

    Args:
        backbone: The stage of the decoder.
        heads: By name; a name has no dot.
        stage: Which part of the model this is.

    Raises:
        NotImplementedError: If embeddings would be tied to several heads.
    """

    def __init__(
        self,
        backbone: TBackbone,
        heads: Mapping[str, TaskHead[THeadShared, THeadOutput]],
        stage: PipelineStageInfo,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.heads = nn.ModuleDict(heads if stage.is_current_stage_last else {})
        self._is_last = stage.is_current_stage_last
        self._is_tied = _share_embeddings(backbone, list(heads.values()))

    def forward(
        self, inputs: SequenceInput | SequenceTransfer[torch.Tensor], shared: SequenceHeadsShared[THeadShared]
    ) -> SequenceTransfer[torch.Tensor] | SequenceHeadsOutput[THeadOutput]:
        """Run the stage: what each head gives in the last one, what the next stage takes in the others.

        Raises:
            ValueError: If `shared` is not for the heads that there are.
        """
        transfer = self.backbone(inputs, shared.sequence)
        if not self._is_last:
            return transfer
        if shared.heads.keys() != self.heads.keys():
            raise ValueError(
                f"the model has the heads {sorted(self.heads)}, but the microbatch is for {sorted(shared.heads)}. Give "
                f"each head what it needs, under its name."
            )
        return {name: head(transfer.hidden_states, shared.heads[name]) for name, head in self.heads.items()}

    def reset_parameters(self) -> None:
        """Initialise the decoder and all heads."""
        self.backbone.reset_parameters()
        for head in self.heads.values():
            cast("TaskHead[THeadShared, THeadOutput]", head).reset_parameters()

    def stage_transfer_spec(
        self, pipeline_input: SequenceInput, boundary: StageBoundary
    ) -> SequenceTransfer[TensorSpec]:
        """Describe what crosses a boundary of the stage."""
        return self.backbone.stage_transfer_spec(pipeline_input, boundary)

    def tied_parameters(self) -> dict[str, str]:
        """Name the weights of this stage that embeddings and heads share; empty if they share none."""
        heads = {f"heads.{name}.": head for name, head in self.heads.items()}
        return _tied_names(self.backbone, heads) if self._is_tied else {}


# Any: heads of all kinds.
def _share_embeddings(backbone: DecoderBackbone, heads: Sequence[TaskHead[Any, Any]]) -> bool:
    """Tell whether a head has the weights of the embeddings, and give it these if this stage has both."""
    if not isinstance(backbone, Decoder) or not backbone.tie_word_embeddings:
        return False
    tied = [head for head in heads if isinstance(head, SplitLanguageModellingHead)]
    if len(tied) > 1:
        raise NotImplementedError(
            f"tie_word_embeddings is set, and {len(tied)} heads predict tokens. Only one can have the weights of the "
            "embeddings: set it to false, or leave the others out."
        )
    if tied and backbone.embed_tokens is not None and backbone.stage.is_current_stage_last:
        tied[0].tie_to(backbone.embed_tokens)
    return bool(tied)


def _tied_names(backbone: DecoderBackbone, heads: Mapping[str, nn.Module | None]) -> dict[str, str]:
    """Return the key of each weight of this stage that is tied, by its name."""
    prefixes = [f"{prefix}lm_head." for prefix, head in heads.items() if isinstance(head, SplitLanguageModellingHead)]
    if isinstance(backbone, Decoder) and backbone.embed_tokens is not None:
        prefixes.append("backbone.embed_tokens.token_embedding.")
    return {
        f"{prefix}{vocabulary}.weight": f"vocabulary {vocabulary}"
        for prefix in prefixes
        for vocabulary in backbone.split_vocab_order
    }
