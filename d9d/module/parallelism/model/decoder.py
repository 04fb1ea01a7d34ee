"""Distribute a decoder, with or without its heads, over the meshes of a job.

[Note: order of the parallelisms]
Experts go to the expert domain first. Then tensor parallelism splits blocks, and attention learns of the ranks with other
parts of a sequence. What is left of a layer then becomes one unit
of FSDP, and last what is outside of the layers, so that it is gathered once and stays for the whole pass: embeddings and
the norm behind the layers. A head is a unit of its own, but one that is tied to the embeddings belongs to theirs: FSDP
gathers a parameter in one unit only.
"""

from typing import Any, TypeAlias

from d9d.core.dist_context import EXPERT_DOMAIN, DistributedContext
from d9d.module.block.attention import GroupedQueryAttention
from d9d.module.block.ffn import SwiGLU
from d9d.module.block.head import ClassificationHead, EmbeddingHead, SplitLanguageModellingHead, TaskHead
from d9d.module.block.moe import MoELayer
from d9d.module.block.normalization import RMSNorm
from d9d.module.model.decoder import Decoder, DecoderLayer
from d9d.module.model.heads import DecoderWithHead, DecoderWithHeads
from d9d.module.parallelism.context_parallel import parallelize_context
from d9d.module.parallelism.expert import parallelize_expert_parallel
from d9d.module.parallelism.key_value_exchange import ContextParallelMethod
from d9d.module.parallelism.model.dense import context_mesh, distribute_dense, tensor_mesh
from d9d.module.parallelism.model.head import (
    parallelize_causal_lm_head,
    parallelize_classification_head,
    parallelize_embedding_head,
)
from d9d.module.parallelism.sequence_sharding import SequenceOrder
from d9d.module.parallelism.tensor_blocks import (
    parallelize_tensor_attention,
    parallelize_tensor_embedding,
    parallelize_tensor_ffn,
    parallelize_tensor_head,
    parallelize_tensor_latent_attention,
    parallelize_tensor_moe,
    parallelize_tensor_norm,
)
from d9d.pipelining.api import PipelineStageInfo

__all__ = [
    "parallelize_decoder",
    "parallelize_deepseek_v3_model",
    "parallelize_llama_model",
    "parallelize_qwen3_dense_model",
    "parallelize_qwen3_moe_model",
]

# Any: heads of all kinds, and what they take and give.
_AnyHead: TypeAlias = TaskHead[Any, Any]
_AnyModel: TypeAlias = Decoder | DecoderWithHead[Any, Any, Any, Any] | DecoderWithHeads[Any, Any, Any]


def parallelize_decoder(
    dist_context: DistributedContext,
    model: _AnyModel,
    stage: PipelineStageInfo,
    *,
    sequence_parallel: bool = False,
    replicate_kv_heads: bool = False,
    context_method: ContextParallelMethod | str = ContextParallelMethod.ring,
    context_order: SequenceOrder | str = SequenceOrder.zigzag,
    **fsdp_kwargs: Any,  # torch's own arguments, passed through
) -> None:
    """Distribute one stage of a model of the catalogue over all meshes of a job, in place.

    Layers are split over ``tp``, experts over ``ep_shard``, and what is left is sharded over ``dp_cp_shard`` and replicated
    over ``dp_replicate`` and ``cp_replicate``. Under context parallelism the model gets parts of sequences, from a
    `SequenceSharding`. Dimensions of size 1 change nothing. No communication.

    Args:
        dist_context: Topology of the job. On one rank nothing changes.
        model: The stage, with or without heads; on the meta device or with values, which must be equal on all ranks.
        stage: Which part of the model it is.
        sequence_parallel: Whether ranks of ``tp`` have parts of the tokens between blocks.
        replicate_kv_heads: Whether ``tp`` may have more ranks than there are key and value heads.
        context_method: How keys travel between ranks with parts of a sequence.
        context_order: Which tokens such a rank has.
        **fsdp_kwargs: Keyword arguments of ``fully_shard``, such as ``mp_policy``, for all units.

    Raises:
        ValueError: If `stage` is another one than the model was built for, or heads, experts or the like can not be
            distributed evenly, with the degrees that can.
        NotImplementedError: If the model keeps means of hidden states over tokens, and ranks of ``tp`` have parts of these.
    """
    backbone, heads = _parts_of(model)
    _check_stage(backbone, stage)
    if not dist_context.is_distributed:
        return
    sequence_parallel = sequence_parallel and dist_context.mesh_params.has_tensor_parallel
    if dist_context.mesh_params.has_expert_parallel:
        _distribute_experts(backbone, dist_context)
    if dist_context.mesh_params.has_tensor_parallel:
        _split_blocks(backbone, dist_context, sequence_parallel, replicate_kv_heads)
    _split_sequences(backbone, dist_context, context_method, context_order)
    for layer in backbone.decoder_layers:
        distribute_dense(layer, dist_context, **fsdp_kwargs)
    tied = [head for head in heads if isinstance(head, SplitLanguageModellingHead) and head.is_tied]
    for head in heads:
        if head not in tied:
            _distribute_head(head, dist_context, sequence_parallel, **fsdp_kwargs)
    for head in tied:
        _split_tied_head(head, backbone, dist_context, sequence_parallel)
    distribute_dense(model if tied else backbone, dist_context, **fsdp_kwargs)


# What a layer is made of decides how it is distributed, so one function knows all models. These are the names under which
# users of one model look for it.
parallelize_deepseek_v3_model = parallelize_decoder
parallelize_llama_model = parallelize_decoder
parallelize_qwen3_dense_model = parallelize_decoder
parallelize_qwen3_moe_model = parallelize_decoder


def _parts_of(model: _AnyModel) -> tuple[Decoder, list[_AnyHead]]:
    if isinstance(model, Decoder):
        return model, []
    backbone: object = model.backbone
    if not isinstance(backbone, Decoder):
        raise TypeError(
            f"parallelize_decoder knows the models of the catalogue, not {type(backbone).__name__}. Distribute it with "
            "functions of d9d.module.parallelism.api, and its heads with those of d9d.module.parallelism.model."
        )
    heads = [model.head] if isinstance(model, DecoderWithHead) else list(model.heads.values())
    return backbone, [head for head in heads if isinstance(head, TaskHead)]


def _check_stage(backbone: Decoder, stage: PipelineStageInfo) -> None:
    if backbone.stage != stage:
        raise ValueError(
            f"the model was built for stage {backbone.stage.current_stage} of {backbone.stage.num_stages}, not for "
            f"{stage.current_stage} of {stage.num_stages}. Pass the stage that it was built for."
        )


def _distribute_experts(backbone: Decoder, dist_context: DistributedContext) -> None:
    mesh = dist_context.mesh_for(EXPERT_DOMAIN)["ep_replicate", "ep_shard", "tp"]
    for layer in backbone.decoder_layers:
        if isinstance(layer.mlp, MoELayer):
            parallelize_expert_parallel(layer.mlp, mesh)


def _split_blocks(
    backbone: Decoder, dist_context: DistributedContext, sequence_parallel: bool, replicate_kv_heads: bool
) -> None:
    mesh = tensor_mesh(dist_context)
    if sequence_parallel:
        backbone.use_token_parts(mesh.size())
    if backbone.embed_tokens is not None:
        parallelize_tensor_embedding(backbone.embed_tokens, mesh, sequence_parallel=sequence_parallel)
    for layer in backbone.decoder_layers:
        match layer.self_attn:
            case GroupedQueryAttention() as attention:
                parallelize_tensor_attention(
                    attention, mesh, sequence_parallel=sequence_parallel, replicate_kv_heads=replicate_kv_heads
                )
            case attention:
                parallelize_tensor_latent_attention(attention, mesh, sequence_parallel=sequence_parallel)
        match layer.mlp:
            case SwiGLU() as feed_forward:
                parallelize_tensor_ffn(feed_forward, mesh, sequence_parallel=sequence_parallel)
            case experts:
                parallelize_tensor_moe(experts, mesh, sequence_parallel=sequence_parallel)
    if sequence_parallel:
        for norm in _norms(backbone.decoder_layers):
            parallelize_tensor_norm(norm, mesh)
        if backbone.norm is not None:
            parallelize_tensor_norm(backbone.norm, mesh)


def _split_sequences(
    backbone: Decoder,
    dist_context: DistributedContext,
    method: ContextParallelMethod | str,
    order: SequenceOrder | str,
) -> None:
    mesh = context_mesh(dist_context)
    if mesh.size() == 1:
        return
    # Not the model as a whole: a stage may have no layers.
    for part in (*backbone.decoder_layers, backbone.token_mean):
        if part is not None:
            parallelize_context(part, mesh, method=method, order=order)


def _split_tied_head(
    head: SplitLanguageModellingHead, backbone: Decoder, dist_context: DistributedContext, sequence_parallel: bool
) -> None:
    """Split a head by the rows of the embeddings that are split already, and let it have their new parameters."""
    if dist_context.mesh_params.has_tensor_parallel:
        parallelize_tensor_head(head, tensor_mesh(dist_context), sequence_parallel=sequence_parallel)
        assert backbone.embed_tokens is not None  # to which the head is tied
        head.tie_to(backbone.embed_tokens)


def _norms(layers: list[DecoderLayer]) -> list[RMSNorm]:
    return [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]


def _distribute_head(
    head: _AnyHead, dist_context: DistributedContext, sequence_parallel: bool, **fsdp_kwargs: Any
) -> None:
    match head:
        case SplitLanguageModellingHead():
            parallelize_causal_lm_head(head, dist_context, sequence_parallel=sequence_parallel, **fsdp_kwargs)
        case ClassificationHead():
            parallelize_classification_head(head, dist_context, sequence_parallel=sequence_parallel, **fsdp_kwargs)
        case EmbeddingHead():
            parallelize_embedding_head(head, dist_context, sequence_parallel=sequence_parallel, **fsdp_kwargs)
        case _ if sequence_parallel:
            raise NotImplementedError(
                f"{type(head).__name__} is a head of your own, which parallelize_decoder can not give all tokens. Use "
                "tensor parallelism without sequence parallelism."
            )
        case _:
            distribute_dense(head, dist_context, **fsdp_kwargs)
