"""Import path of the pack streams that jobs use since d9d 0.24."""

from d9d.dataset.pack_stream import (
    FixedCountMicrobatchPacker,
    PinMemoryMicrobatchPackStream,
    num_microbatches_for_global_batch,
)

__all__ = ["FixedCountMicrobatchPacker", "PinMemoryMicrobatchPackStream", "num_microbatches_for_global_batch"]
