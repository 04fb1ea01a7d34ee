"""Mappers between decoders and Hugging Face's models: what all families have in common.

A family says how one of its layers is mapped (`DecoderMapping`), and has all of these mappers by that. All read from
Hugging Face's names, and have an inverse that writes them. They are for the whole model, or for one stage of it.

[Note: mappers of a family]
What differs between families is how layers are mapped, and what describes a model: its parameters (`DenseFamily`), or also how
files hold its experts (`MixtureFamily`). Both describe a model without heads, with a head, and with one that gives vectors as a
`DecoderMapping`. `loading` and `exporting` make the mappers of a family of these, which take the same arguments.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, ParamSpec, TypeAlias, TypeVar

from d9d.model_state.mapper import ModelStateMapper
from d9d.model_state.mapper.adapters import identity_mapper_from_names
from d9d.model_state.mapper.compose import (
    ModelStateMapperParallel,
    ModelStateMapperPrefixScope,
    ModelStateMapperSequential,
)
from d9d.model_state.mapper.leaf import (
    ModelStateMapperChunkTensors,
    ModelStateMapperIdentity,
    ModelStateMapperRename,
    ModelStateMapperStackTensors,
    ModelStateMapperTie,
    ModelStateMapperTranspose,
)
from d9d.module.model.decoder import layers_of_stage
from d9d.module.model.heads import SINGLE_HEAD_PREFIX
from d9d.module.model.parameters import DecoderParameters
from d9d.pipelining.api import PipelineStageInfo

__all__ = [
    "GROUPED_QUERY_ATTENTION",
    "LAYER_NORMS",
    "SWIGLU",
    "DecoderMapping",
    "DenseFamily",
    "ExpertsFormat",
    "MapLayer",
    "MixtureFamily",
    "exporting",
    "loading",
    "map_experts",
    "map_same_names",
]

LAYER_NORMS: Final = ("input_layernorm.weight", "post_attention_layernorm.weight")
"""Names of the norms of a layer, here and there."""
GROUPED_QUERY_ATTENTION: Final = tuple(f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "o"))
"""Names of the projections of attention, here and there."""
SWIGLU: Final = tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
"""Names of the projections of a feed-forward network, here and there."""

P = ParamSpec("P")
TParams = TypeVar("TParams", bound=DecoderParameters)
MapLayer: TypeAlias = Callable[[int], ModelStateMapper]
"""Returns the mapper of the layer of an index, with names relative to it."""

_EMBEDDINGS = "embed_tokens.weight"
_HEAD = "lm_head.weight"


def map_same_names(*names: str) -> ModelStateMapper:
    """Return the mapper of tensors that have the same name, and layout, here and there."""
    return identity_mapper_from_names(names)


class ExpertsFormat(StrEnum):
    """How files hold the experts of a layer."""

    MODULE_LIST = "module_list"
    """Each expert has tensors of its own, ``mlp.experts.0.gate_proj.weight`` and so on: as published, and as
    ``save_pretrained`` writes them."""
    FUSED = "fused"
    """All experts of a layer are in ``mlp.experts.gate_up_proj`` and ``mlp.experts.down_proj``: as the modules of
    ``transformers`` 5 hold them."""


def map_experts(experts_format: ExpertsFormat, num_experts: int, intermediate_size: int) -> ModelStateMapper:
    """Return the mapper of the experts of a layer.

    Args:
        experts_format: How the files hold them.
        num_experts: Number of experts.
        intermediate_size: Width between the projections of one.
    """
    match experts_format:
        case ExpertsFormat.MODULE_LIST:
            return _map_listed_experts(num_experts)
        case ExpertsFormat.FUSED:
            return _map_fused_experts(intermediate_size)


def _map_listed_experts(num_experts: int) -> ModelStateMapper:
    """Return the mapper of experts that are modules of their own there: ``(W, H)`` each, here one ``(E, H, W)``."""

    def stacked(name: str) -> ModelStateMapper:
        target = f"mlp.grouped_experts.{name}.weight"
        sources = [f"mlp.experts.{expert}.{name}.weight" for expert in range(num_experts)]
        return ModelStateMapperSequential(
            [ModelStateMapperStackTensors(sources, target, dim=0), ModelStateMapperTranspose(target, (1, 2))]
        )

    return ModelStateMapperParallel([stacked(name) for name in ("gate_proj", "up_proj", "down_proj")])


def _map_fused_experts(intermediate_size: int) -> ModelStateMapper:
    """Return the mapper of experts that are one tensor there: ``(E, 2 W, H)`` of both first projections and ``(E, H, W)``."""
    gate, up, down = (f"mlp.grouped_experts.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj"))
    cut = ModelStateMapperChunkTensors(
        "mlp.experts.gate_up_proj", [gate, up], dim=1, sizes=[intermediate_size, intermediate_size]
    )
    renamed = ModelStateMapperRename("mlp.experts.down_proj", down)
    transposed = [ModelStateMapperTranspose(name, (1, 2)) for name in (gate, up, down)]
    return ModelStateMapperSequential([ModelStateMapperParallel([cut, renamed]), ModelStateMapperParallel(transposed)])


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderMapping:
    """Knows how a model is named and cut in Hugging Face's files.

    Attributes:
        params: The model.
        map_layer: Returns the mapper of the layer of an index, with names relative to it.
        stage: The pipeline stage whose tensors are mapped; None for the whole model.
        head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
        embedding_dim: If a head that gives vectors has a projection that files have too, or shall have, its size.
    """

    params: DecoderParameters
    map_layer: MapLayer
    stage: PipelineStageInfo | None
    head_prefix: str = SINGLE_HEAD_PREFIX
    embedding_dim: int | None = None

    def with_head(self, head_prefix: str, embedding_dim: int | None = None) -> "DecoderMapping":
        """Return the same with a head.

        Args:
            head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
            embedding_dim: If a head that gives vectors has a projection that files have too, or shall have, its size.
        """
        prefix = head_prefix if not head_prefix or head_prefix.endswith(".") else f"{head_prefix}."
        return dataclasses.replace(self, head_prefix=prefix, embedding_dim=embedding_dim)

    def backbone(self) -> ModelStateMapper:
        """Map a model without heads."""
        embeddings = [self._vocabularies(_EMBEDDINGS, "embed_tokens.token_embedding.")] if self._is_first else []
        return ModelStateMapperParallel([*embeddings, *self._behind_embeddings()])

    def causal_lm(self) -> ModelStateMapper:
        """Map a model that predicts tokens. Tied weights are read once, and must be equal where a file has both."""
        if not self.params.tie_word_embeddings:
            head = self._vocabularies(_HEAD, f"{self.head_prefix}lm_head.")
            return self._with_head("model.", [head])
        behind = ModelStateMapperPrefixScope(ModelStateMapperParallel(self._behind_embeddings()), "model.", "backbone.")
        return ModelStateMapperParallel([behind, *self._tied_vocabularies()])

    def causal_lm_tied_once(self) -> ModelStateMapper:
        """Map a model that predicts tokens, whose tied weights are those of the embeddings alone: for exports."""
        return self._with_head("model.", []) if self.params.tie_word_embeddings else self.causal_lm()

    def classification(self) -> ModelStateMapper:
        """Map a model that scores labels."""
        return self._with_head("model.", [ModelStateMapperRename("score.weight", f"{self.head_prefix}score.weight")])

    def embedding(self) -> ModelStateMapper:
        """Map a model that gives vectors, which is one without heads there; a projection is named as that of a single head."""
        theirs, ours = (f"{prefix}projection.weight" for prefix in (SINGLE_HEAD_PREFIX, self.head_prefix))
        return self._with_head("", [] if self.embedding_dim is None else [ModelStateMapperRename(theirs, ours)])

    @property
    def _is_first(self) -> bool:
        return self.stage is None or self.stage.is_current_stage_first

    @property
    def _is_last(self) -> bool:
        return self.stage is None or self.stage.is_current_stage_last

    def _with_head(self, source_prefix: str, head: list[ModelStateMapper]) -> ModelStateMapper:
        backbone = ModelStateMapperPrefixScope(self.backbone(), source_prefix, "backbone.")
        return ModelStateMapperParallel([backbone, *(head if self._is_last else [])])

    def _behind_embeddings(self) -> list[ModelStateMapper]:
        layers = [
            ModelStateMapperPrefixScope(self.map_layer(index), f"layers.{index}.", f"layers.{index}.")
            for index in layers_of_stage(self.params, self.stage or PipelineStageInfo(0, 1))
        ]
        return [*layers, *([ModelStateMapperIdentity("norm.weight")] if self._is_last else [])]

    def _vocabularies(self, source: str, prefix: str) -> ModelStateMapper:
        """Cut the rows of all vocabularies into those of each."""
        order, sizes = self.params.split_vocab_order, self.params.split_vocab_size
        return ModelStateMapperChunkTensors(
            source, [f"{prefix}{name}.weight" for name in order], dim=0, sizes=[sizes[name] for name in order]
        )

    def _tied_vocabularies(self) -> list[ModelStateMapper]:
        """Give embeddings and head, as far as this stage has them, the rows of one tensor."""
        prefixes: dict[str, str] = {}
        if self._is_first:
            prefixes["embeddings"] = "backbone.embed_tokens.token_embedding."
        if self._is_last:
            prefixes["head"] = f"{self.head_prefix}lm_head."
        if not prefixes:
            return []
        tie = ModelStateMapperTie([f"model.{_EMBEDDINGS}", _HEAD], list(prefixes))
        cut = [self._vocabularies(whole, prefix) for whole, prefix in prefixes.items()]
        return [ModelStateMapperSequential([tie, ModelStateMapperParallel(cut)])]


@dataclass(frozen=True, slots=True)
class DenseFamily(Generic[TParams]):
    """A family whose models are described by their parameters. See [Note: mappers of a family].

    Attributes:
        map_layers: Returns, for a model, what maps its layers.
    """

    map_layers: Callable[[TParams], MapLayer]

    def model(self, params: TParams, *, stage: PipelineStageInfo | None = None) -> DecoderMapping:
        """Describe a model without heads.

        Args:
            params: The whole model.
            stage: The pipeline stage that is loaded or exported; None for the whole model.
        """
        return DecoderMapping(params=params, map_layer=self.map_layers(params), stage=stage)

    def model_with_head(
        self, params: TParams, *, head_prefix: str = SINGLE_HEAD_PREFIX, stage: PipelineStageInfo | None = None
    ) -> DecoderMapping:
        """Describe a model with a head.

        Args:
            params: The whole model.
            head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
            stage: The pipeline stage that is loaded or exported; None for the whole model.
        """
        return self.model(params, stage=stage).with_head(head_prefix)

    def model_with_vectors(
        self,
        params: TParams,
        *,
        embedding_dim: int | None = None,
        head_prefix: str = SINGLE_HEAD_PREFIX,
        stage: PipelineStageInfo | None = None,
    ) -> DecoderMapping:
        """Describe a model with a head that gives vectors.

        Args:
            params: The whole model.
            embedding_dim: If the head has a projection whose weights the files have too, or shall have, its size. In files it
                is ``head.projection.weight``, which ``transformers`` does not expect and says so. None leaves it out: a new
                projection then is named in ``keep`` of `load_model_state`.
            head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
            stage: The pipeline stage that is loaded or exported; None for the whole model.
        """
        return self.model(params, stage=stage).with_head(head_prefix, embedding_dim)


@dataclass(frozen=True, slots=True)
class MixtureFamily(Generic[TParams]):
    """A family whose files hold experts in one of several formats. See [Note: mappers of a family].

    Attributes:
        map_layers: Returns, for a model and a format, what maps its layers.
    """

    map_layers: Callable[[TParams, ExpertsFormat], MapLayer]

    def model(
        self, params: TParams, experts_format: ExpertsFormat, *, stage: PipelineStageInfo | None = None
    ) -> DecoderMapping:
        """Describe a model without heads.

        Args:
            params: The whole model.
            experts_format: How the files hold the experts.
            stage: The pipeline stage that is loaded or exported; None for the whole model.
        """
        return DecoderMapping(params=params, map_layer=self.map_layers(params, experts_format), stage=stage)

    def model_with_head(
        self,
        params: TParams,
        experts_format: ExpertsFormat,
        *,
        head_prefix: str = SINGLE_HEAD_PREFIX,
        stage: PipelineStageInfo | None = None,
    ) -> DecoderMapping:
        """Describe a model with a head.

        Args:
            params: The whole model.
            experts_format: How the files hold the experts.
            head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
            stage: The pipeline stage that is loaded or exported; None for the whole model.
        """
        return self.model(params, experts_format, stage=stage).with_head(head_prefix)

    def model_with_vectors(
        self,
        params: TParams,
        experts_format: ExpertsFormat,
        *,
        embedding_dim: int | None = None,
        head_prefix: str = SINGLE_HEAD_PREFIX,
        stage: PipelineStageInfo | None = None,
    ) -> DecoderMapping:
        """Describe a model with a head that gives vectors.

        Args:
            params: The whole model.
            experts_format: How the files hold the experts.
            embedding_dim: If the head has a projection whose weights the files have too, or shall have, its size. In files it
                is ``head.projection.weight``, which ``transformers`` does not expect and says so. None leaves it out: a new
                projection then is named in ``keep`` of `load_model_state`.
            head_prefix: What names of the head begin with; ``heads.<name>.`` in `DecoderWithHeads`.
            stage: The pipeline stage that is loaded or exported; None for the whole model.
        """
        return self.model(params, experts_format, stage=stage).with_head(head_prefix, embedding_dim)


def loading(
    describe: Callable[P, DecoderMapping], model: Callable[[DecoderMapping], ModelStateMapper]
) -> Callable[P, ModelStateMapper]:
    """Return the function that returns the mapper from Hugging Face's files to a model. See [Note: mappers of a family].

    Args:
        describe: Takes what describes the model.
        model: Which model it is, a method of `DecoderMapping`.
    """

    @functools.wraps(describe)
    def build(*args: P.args, **kwargs: P.kwargs) -> ModelStateMapper:
        return model(describe(*args, **kwargs))

    return build


def exporting(
    describe: Callable[P, DecoderMapping], model: Callable[[DecoderMapping], ModelStateMapper]
) -> Callable[P, ModelStateMapper]:
    """Return the function that returns the mapper from a model to Hugging Face's files; arguments as in `loading`."""

    @functools.wraps(describe)
    def build(*args: P.args, **kwargs: P.kwargs) -> ModelStateMapper:
        return model(describe(*args, **kwargs)).inverse()

    return build
