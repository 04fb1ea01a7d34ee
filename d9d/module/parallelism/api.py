"""The functions that distribute a submodule: each sets placements, and the rest of the package reads them."""

from d9d.module.parallelism.context_parallel import parallelize_context
from d9d.module.parallelism.expert import parallelize_expert_parallel
from d9d.module.parallelism.key_value_exchange import ContextParallelMethod
from d9d.module.parallelism.replicate import parallelize_replicate
from d9d.module.parallelism.sequence_sharding import SequenceOrder, SequenceSharding, document_ids, document_mask
from d9d.module.parallelism.shard import parallelize_fsdp, parallelize_hsdp
from d9d.module.parallelism.tensor import parallelize_tensor
from d9d.module.parallelism.tensor_blocks import (
    parallelize_tensor_attention,
    parallelize_tensor_embedding,
    parallelize_tensor_ffn,
    parallelize_tensor_head,
    parallelize_tensor_latent_attention,
    parallelize_tensor_moe,
    parallelize_tensor_norm,
    parallelize_tensor_pooling_head,
)

__all__ = [
    "ContextParallelMethod",
    "SequenceOrder",
    "SequenceSharding",
    "document_ids",
    "document_mask",
    "parallelize_context",
    "parallelize_expert_parallel",
    "parallelize_fsdp",
    "parallelize_hsdp",
    "parallelize_replicate",
    "parallelize_tensor",
    "parallelize_tensor_attention",
    "parallelize_tensor_embedding",
    "parallelize_tensor_ffn",
    "parallelize_tensor_head",
    "parallelize_tensor_latent_attention",
    "parallelize_tensor_moe",
    "parallelize_tensor_norm",
    "parallelize_tensor_pooling_head",
]
