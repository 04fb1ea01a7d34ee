"""Collectives of a model that tensor parallelism splits: as many as the papers count, and no more.

Sources: "Megatron-LM", https://arxiv.org/abs/1909.08053, section 3; "Reducing Activation Recomputation in Large Transformer
Models", https://arxiv.org/abs/2205.05198, section 4.2.2.
"""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from d9d.core.dist_context import DeviceMeshParameters
from d9d.module.model.io import SequenceInput, SequenceShared
from d9d.module.parallelism.model import parallelize_decoder
from d9d.pipelining.api import PipelineStageInfo
from tests.d9d.module.model.catalogue import CATALOGUE, LAYERS, VOCAB, tokens

FUNCTIONAL = torch.ops.c10d_functional
SUM, GATHER, SCATTER = FUNCTIONAL.all_reduce, FUNCTIONAL.all_gather_into_tensor, FUNCTIONAL.reduce_scatter_tensor
NUM_BLOCKS = 2 * LAYERS  # attention and a feed-forward network
# Gradients of norms of queries and of keys: each rank sees its own heads.
NUM_HEAD_NORMS = 2 * LAYERS
# Norms between blocks: under sequence parallelism each rank sees its own tokens.
NUM_NORMS = 2 * LAYERS + 1

FORWARD = {
    False: {SUM: len(VOCAB) + NUM_BLOCKS},
    # Vectors of several vocabularies are summed whole, and then cut.
    True: {SUM: len(VOCAB), GATHER: NUM_BLOCKS, SCATTER: NUM_BLOCKS},
}
BACKWARD = {
    False: {SUM: NUM_BLOCKS + NUM_HEAD_NORMS},
    True: {GATHER: NUM_BLOCKS + 1, SCATTER: NUM_BLOCKS, SUM: NUM_HEAD_NORMS + NUM_NORMS},
}


@pytest.mark.world_size(2, timeout_s=120.0)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_decoder(sequence_parallel: bool):
    model = CATALOGUE["qwen3 dense"].build(False)
    context = DeviceMeshParameters(tensor_parallel=2).build()
    parallelize_decoder(context, model, PipelineStageInfo(0, 1), sequence_parallel=sequence_parallel)
    ids = tokens()
    shared = SequenceShared(position_ids=torch.arange(ids.shape[1]).expand_as(ids))
    with CommDebugMode() as forward:
        states = model(SequenceInput(input_ids=ids), shared).hidden_states
    assert dict(forward.get_comm_counts()) == FORWARD[sequence_parallel]
    with CommDebugMode() as backward:
        states.sin().sum().backward()
    assert dict(backward.get_comm_counts()) == BACKWARD[sequence_parallel]
