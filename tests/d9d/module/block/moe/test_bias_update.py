"""Biases move by the loads of all ranks and microbatches of a step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d.core.dist_context import DeviceMeshParameters
from d9d.module.block.moe import MoELayer, update_expert_biases

NUM_EXPERTS = 4


def build() -> MoELayer:
    """A token goes to the expert of its largest feature."""
    layer = MoELayer(NUM_EXPERTS, 3, NUM_EXPERTS, 1, False, enable_expert_bias=True)
    nn.init.eye_(layer.router.gate.weight)
    return layer


def tokens_for(*experts: int) -> torch.Tensor:
    return torch.eye(NUM_EXPERTS)[list(experts)]


def test_one_process_with_accumulation():
    model = nn.ModuleList([build(), MoELayer(2, 3, NUM_EXPERTS, 1, False)])
    layer = model[0]
    # Loads 3, 1, 0, 0 in two microbatches; the mean is 1.
    layer(tokens_for(0, 0))
    layer(tokens_for(0, 1))
    update_expert_biases([model, layer], 0.5, None)
    assert layer.router.expert_bias.tolist() == [-0.5, 0.0, 0.5, 0.5]
    assert not layer.tokens_per_expert.any()
    update_expert_biases([model], 0.5, None)  # without a token
    assert layer.router.expert_bias.tolist() == [-0.5, 0.0, 0.5, 0.5]


@pytest.mark.world_size(4)
def test_loads_of_all_data_ranks_count_once():
    """Tensor-parallel peers have the same tokens; the other ranks have others, as those of context parallelism do."""
    context = DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=2).build()
    first, second = build(), build()
    # Loads of the first layer: 2 + 0, 1 + 1, 0 + 2, 0 + 3 on the two data-parallel ranks, with a mean of 2.25.
    first(tokens_for(*((0, 0, 1), (1, 2, 2, 3, 3, 3))[context.dp_rank]))
    second(tokens_for(context.dp_rank))
    update_expert_biases([first, second], 1.0, context.replica_group)
    assert first.router.expert_bias.tolist() == [1.0, 1.0, 1.0, -1.0]
    assert second.router.expert_bias.tolist() == [-1.0, -1.0, 1.0, 1.0]
    assert dist.get_world_size() == 4
