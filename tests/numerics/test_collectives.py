"""Collectives of a model that tensor or expert parallelism splits: as many as the papers count, and no more.

Sources: "Megatron-LM", https://arxiv.org/abs/1909.08053, section 3; "Reducing Activation Recomputation in Large Transformer
Models", https://arxiv.org/abs/2205.05198, section 4.2.2.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from d9d.core.dist_context import DENSE_DOMAIN, EXPERT_DOMAIN, DeviceMeshParameters
from d9d.module.block.moe import MoELayer, SharedExpertParameters
from d9d.module.model import DecoderForCausalLM
from d9d.module.parallelism.api import parallelize_expert_parallel, parallelize_tensor_moe
from d9d.module.parallelism.model import parallelize_decoder
from d9d.pipelining.api import PipelineStageInfo
from tests.d9d.module.model.catalogue import CATALOGUE, HIDDEN, LAYERS, VOCAB, tokens
from tests.d9d.module.model.test_distributed import losses_of

FUNCTIONAL = torch.ops.c10d_functional
SUM, GATHER, SCATTER = FUNCTIONAL.all_reduce, FUNCTIONAL.all_gather_into_tensor, FUNCTIONAL.reduce_scatter_tensor
SUM_IN_PLACE, EXCHANGE = torch.ops.c10d.allreduce_, torch.ops.c10d.alltoall_base_
WHOLE = PipelineStageInfo(0, 1)

# Blocks of a layer whose parts are summed: attention and a feed-forward network. All ranks compute the same experts, which
# need no sum, and only all tokens under sequence parallelism.
SPLIT_BLOCKS = {"qwen3 dense": 2 * LAYERS, "qwen3 moe": LAYERS}
NUM_BLOCKS = 2 * LAYERS
# Gradients of norms of queries and of keys: each rank sees its own heads.
NUM_HEAD_NORMS = 2 * LAYERS
# Norms between blocks: under sequence parallelism each rank sees its own tokens.
NUM_NORMS = 2 * LAYERS + 1
# The largest logit of each token; then the sum of exponentials and the logit of the label.
NUM_OF_LOSS = 2


def theory(name: str, sequence_parallel: bool) -> tuple[dict[Any, int], dict[Any, int]]:
    """Forward and backward pass of a decoder with its head. Vectors of several vocabularies are summed whole, and then cut."""
    split = SPLIT_BLOCKS[name]
    if not sequence_parallel:
        return {SUM: len(VOCAB) + split, SUM_IN_PLACE: NUM_OF_LOSS}, {SUM: split + NUM_HEAD_NORMS + 1}
    forward = {SUM: len(VOCAB), SUM_IN_PLACE: NUM_OF_LOSS, GATHER: NUM_BLOCKS + 1, SCATTER: split}
    return forward, {GATHER: NUM_BLOCKS + 1, SCATTER: split + 1, SUM: NUM_HEAD_NORMS + NUM_NORMS}


@pytest.mark.world_size(2, timeout_s=120.0)
@pytest.mark.parametrize("name", SPLIT_BLOCKS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_split_model(name: str, sequence_parallel: bool):
    model = DecoderForCausalLM(CATALOGUE[name].build(False), WHOLE)
    context = DeviceMeshParameters(tensor_parallel=2).build()
    parallelize_decoder(context, model, WHOLE, sequence_parallel=sequence_parallel)
    with CommDebugMode() as forward:
        losses = losses_of(model, tokens())
    with CommDebugMode() as backward:
        losses.sum().backward()
    assert (dict(forward.get_comm_counts()), dict(backward.get_comm_counts())) == theory(name, sequence_parallel)


@pytest.mark.world_size(2)
def test_experts_of_two_ranks():
    """Numbers of tokens, tokens with their weights, and outputs; the way back has no numbers. One of each for a layer."""
    layer = MoELayer(HIDDEN, 12, 4, 2, True)
    mesh = DeviceMeshParameters(data_parallel_replicate=2, expert_parallel=2).build().mesh_for(EXPERT_DOMAIN)
    parallelize_expert_parallel(layer, mesh)
    counts = counts_of(layer, torch.randn(2, 8, HIDDEN, requires_grad=True))
    assert counts == ({EXCHANGE: 1 + 2 + 1}, {EXCHANGE: 2 + 1})


@pytest.mark.world_size(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_shared_expert(sequence_parallel: bool):
    """Split like a feed-forward network; what it gives is whole on each rank, as that of the others, before tokens are cut."""
    layer = MoELayer(HIDDEN, 12, 4, 2, True, SharedExpertParameters(intermediate_size=6, enable_gate=True))
    mesh = DeviceMeshParameters(tensor_parallel=2).build().mesh_for(DENSE_DOMAIN)["tp"]
    parallelize_tensor_moe(layer, mesh, sequence_parallel=sequence_parallel)
    counts = counts_of(layer, torch.randn(2, 8, HIDDEN, requires_grad=True))
    cut = {GATHER: 1} if sequence_parallel else {}
    assert counts == ({SUM: 1, **cut}, {SUM: 1, **cut})


def counts_of(module: nn.Module, inputs: torch.Tensor) -> tuple[dict[Any, int], dict[Any, int]]:
    with CommDebugMode() as forward:
        output = module(inputs)
    with CommDebugMode() as backward:
        output.sum().backward()
    return dict(forward.get_comm_counts()), dict(backward.get_comm_counts())
