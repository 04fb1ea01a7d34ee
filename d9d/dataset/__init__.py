"""Datasets, collation and streams of packs."""

from d9d.dataset.collate import (
    PaddingSide1D,
    TokenPoolingType,
    pad_stack_1d,
    token_pooling_mask_from_attention_mask,
)
from d9d.dataset.pack_stream import (
    FixedCountMicrobatchPacker,
    PinMemoryMicrobatchPackStream,
    num_microbatches_for_global_batch,
)
from d9d.dataset.sharded import (
    BufferSortedDataset,
    DatasetImplementingSortKeyProtocol,
    ShardedDataset,
    ShardIndexingMode,
    shard_dataset_data_parallel,
)

__all__ = [
    "BufferSortedDataset",
    "DatasetImplementingSortKeyProtocol",
    "FixedCountMicrobatchPacker",
    "PaddingSide1D",
    "PinMemoryMicrobatchPackStream",
    "ShardIndexingMode",
    "ShardedDataset",
    "TokenPoolingType",
    "num_microbatches_for_global_batch",
    "pad_stack_1d",
    "shard_dataset_data_parallel",
    "token_pooling_mask_from_attention_mask",
]
