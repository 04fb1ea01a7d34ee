"""What all decoders have in common, as a config."""

import abc
import dataclasses
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from d9d.core.config import Config
from d9d.module.block.positional import (
    LinearRopeScaling,
    Llama3RopeScaling,
    NoRopeScaling,
    NtkRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)

__all__ = [
    "AnyRopeScalingConfig",
    "DecoderParameters",
    "GroupedQueryLayerParameters",
    "LinearRopeScalingConfig",
    "Llama3RopeScalingConfig",
    "NtkRopeScalingConfig",
    "SharedCounts",
    "YarnRopeScalingConfig",
    "build_rope_scaling",
]


class LinearRopeScalingConfig(Config):
    """See `LinearRopeScaling`."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["linear"] = "linear"
    factor: PositiveFloat
    """How many times longer the context becomes."""


class NtkRopeScalingConfig(Config):
    """See `NtkRopeScaling`."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["ntk"] = "ntk"
    factor: PositiveFloat
    """How many times longer the context becomes."""


class YarnRopeScalingConfig(Config):
    """See `YarnRopeScaling`."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    """How many times longer the context becomes."""
    original_max_position_embeddings: PositiveInt
    """Length of the original context in tokens."""
    beta_fast: PositiveFloat = 32.0
    """Pairs that turn more often over the original context keep their pace; as in the paper."""
    beta_slow: PositiveFloat = 1.0
    """Pairs that turn less often over the original context are interpolated fully; as in the paper."""
    mscale: float | None = None
    """Weight of the logarithm in the factor on cosines and sines, as DeepSeek's models have it."""
    mscale_all_dim: float | None = None
    """The same for what that factor is divided by; attention logits are multiplied by the square instead."""


class Llama3RopeScalingConfig(Config):
    """See `Llama3RopeScaling`."""

    model_config = ConfigDict(frozen=True)

    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat
    """How many times slower the slow pairs turn."""
    low_freq_factor: PositiveFloat = 1.0
    """Pairs with fewer turns over the original context are interpolated; as in Llama 3.1."""
    high_freq_factor: PositiveFloat = 4.0
    """Pairs with more turns over the original context are kept; as in Llama 3.1."""
    original_max_position_embeddings: PositiveInt
    """Length of the original context in tokens."""


AnyRopeScalingConfig: TypeAlias = Annotated[
    LinearRopeScalingConfig | NtkRopeScalingConfig | YarnRopeScalingConfig | Llama3RopeScalingConfig,
    Field(discriminator="kind"),
]
"""How rotary embeddings are stretched."""


def build_rope_scaling(config: AnyRopeScalingConfig | None) -> RopeScaling:
    """Build what a config names; None stretches nothing."""
    match config:
        case None:
            return NoRopeScaling()
        case LinearRopeScalingConfig():
            return LinearRopeScaling(config.factor)
        case NtkRopeScalingConfig():
            return NtkRopeScaling(config.factor)
        case YarnRopeScalingConfig():
            return YarnRopeScaling(
                config.factor,
                config.beta_fast,
                config.beta_slow,
                config.original_max_position_embeddings,
                mscale=config.mscale,
                mscale_all_dim=config.mscale_all_dim,
            )
        case Llama3RopeScalingConfig():
            return Llama3RopeScaling(
                config.factor, config.low_freq_factor, config.high_freq_factor, config.original_max_position_embeddings
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedCounts:
    """What a model has a number of, that ranks must be able to share evenly.

    Attributes:
        num_heads: Query heads of a layer.
        num_kv_heads: Key and value heads of a layer.
        num_experts: Experts of a layer, but for shared ones; None if no layer has any.
    """

    num_heads: int
    num_kv_heads: int
    num_experts: int | None = None


class DecoderParameters(Config, abc.ABC):
    """Describes a decoder but for its layers, which each model describes itself."""

    num_hidden_layers: PositiveInt
    """Number of layers of the whole model."""
    rope_base: PositiveInt
    """Base of the wavelengths of rotary embeddings ("theta")."""
    rope_scaling: AnyRopeScalingConfig | None = None
    """How they are stretched; by default not at all."""
    max_position_ids: PositiveInt
    """Positions of tokens are below this number: the longest sequence, in tokens."""
    split_vocab_size: dict[str, PositiveInt]
    """Number of tokens of each vocabulary, by its name. Models of other tools have one, whose rows are cut."""
    split_vocab_order: list[str]
    """Names of the vocabularies, in the order of token ids."""
    tie_word_embeddings: bool = False
    """Whether a language modelling head has the weights of the embeddings."""
    pipeline_num_virtual_layers_pre: NonNegativeInt = 0
    """How many layers the work of the embeddings counts for, when layers are distributed over pipeline stages."""
    pipeline_num_virtual_layers_post: NonNegativeInt = 0
    """The same for the heads."""

    @abc.abstractmethod
    def shared_counts(self) -> SharedCounts:
        """Return what of the model ranks must be able to share evenly."""


class GroupedQueryLayerParameters(Config):
    """Describes a layer with grouped-query attention but for its feed-forward network."""

    hidden_size: PositiveInt
    """Size of a token's vector."""
    num_attention_heads: PositiveInt
    """Number of query heads."""
    num_key_value_heads: PositiveInt
    """Number of key and value heads, which divides that of query heads."""
    rms_norm_eps: PositiveFloat
    """Epsilon of all norms."""
    head_dim: PositiveInt
    """Size of a head; even."""
