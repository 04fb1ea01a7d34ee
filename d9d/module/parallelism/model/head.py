"""Distribute the heads of a model over the meshes of a job."""

from typing import Any

from d9d.core.dist_context import DistributedContext
from d9d.module.block.head import ClassificationHead, EmbeddingHead, SplitLanguageModellingHead
from d9d.module.parallelism.context_parallel import parallelize_context
from d9d.module.parallelism.model.dense import context_mesh, distribute_dense, tensor_mesh
from d9d.module.parallelism.tensor_blocks import parallelize_tensor_head, parallelize_tensor_pooling_head

__all__ = ["parallelize_causal_lm_head", "parallelize_classification_head", "parallelize_embedding_head"]


# Any, here and below: the arguments of ``fully_shard`` are torch's own, passed through.
def parallelize_causal_lm_head(
    head: SplitLanguageModellingHead,
    dist_context: DistributedContext,
    *,
    sequence_parallel: bool = False,
    **fsdp_kwargs: Any,
) -> None:
    """Split a head by the rows of its vocabularies over ``tp``, and shard or replicate what is left, in place.

    No communication. On one rank nothing changes.

    Args:
        head: Head to change; on the meta device or with values, which must be equal on all ranks.
        dist_context: Topology of the job.
        sequence_parallel: Whether the decoder before it gives each rank a part of the tokens.
        **fsdp_kwargs: Keyword arguments of ``fully_shard``, such as ``mp_policy``.

    Raises:
        ValueError: If the head has the weights of embeddings, with which it must be distributed.
    """
    if not dist_context.is_distributed:
        return
    if head.is_tied:
        raise ValueError(
            "this head has the weights of the embeddings (tie_word_embeddings), and they would come apart. Call "
            "parallelize_decoder with the whole model, instead of one function for the decoder and one for the head."
        )
    mesh = tensor_mesh(dist_context)
    if mesh.size() > 1:
        parallelize_tensor_head(head, mesh, sequence_parallel=sequence_parallel)
    distribute_dense(head, dist_context, **fsdp_kwargs)


def parallelize_classification_head(
    head: ClassificationHead,
    dist_context: DistributedContext,
    *,
    sequence_parallel: bool = False,
    **fsdp_kwargs: Any,
) -> None:
    """Shard or replicate a head, in place; ranks of ``tp`` all compute the same scores.

    Under context parallelism it pools the tokens of whole sequences, see [Note: outputs of whole sequences]. No communication.
    On one rank nothing changes.

    Args:
        head: Head to change; on the meta device or with values, which must be equal on all ranks.
        dist_context: Topology of the job.
        sequence_parallel: Whether the decoder before it gives each rank a part of the tokens.
        **fsdp_kwargs: Keyword arguments of ``fully_shard``.
    """
    _parallelize_pooling_head(head, dist_context, sequence_parallel, **fsdp_kwargs)


def parallelize_embedding_head(
    head: EmbeddingHead, dist_context: DistributedContext, *, sequence_parallel: bool = False, **fsdp_kwargs: Any
) -> None:
    """Shard or replicate a head, in place; ranks of ``tp`` all compute the same vectors.

    Under context parallelism it pools the tokens of whole sequences, see [Note: outputs of whole sequences]. No communication.
    On one rank nothing changes.

    Args:
        head: Head to change; on the meta device or with values, which must be equal on all ranks.
        dist_context: Topology of the job.
        sequence_parallel: Whether the decoder before it gives each rank a part of the tokens.
        **fsdp_kwargs: Keyword arguments of ``fully_shard``.
    """
    _parallelize_pooling_head(head, dist_context, sequence_parallel, **fsdp_kwargs)


def _parallelize_pooling_head(
    head: ClassificationHead | EmbeddingHead,
    dist_context: DistributedContext,
    sequence_parallel: bool,
    **fsdp_kwargs: Any,
) -> None:
    if not dist_context.is_distributed:
        return
    parallelize_context(head, context_mesh(dist_context))
    if sequence_parallel:
        parallelize_tensor_pooling_head(head, tensor_mesh(dist_context))
    distribute_dense(head, dist_context, **fsdp_kwargs)
