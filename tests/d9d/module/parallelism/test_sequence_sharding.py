"""Cutting sequences into the parts of ranks, and back; masks of packed documents."""

import copy

import pytest
import torch
import torch.distributed as dist

from d9d.core.dist_context import BATCH_DOMAIN, DENSE_DOMAIN, DeviceMeshParameters
from d9d.module.parallelism.sequence_sharding import SequenceOrder, SequenceSharding, document_ids, document_mask

BOTH = pytest.mark.parametrize("order", list(SequenceOrder))


def test_which_tokens_a_rank_has():
    tokens = torch.arange(12).view(1, 12)

    def parts(order: SequenceOrder, num_ranks: int) -> list[list[int]]:
        shardings = [SequenceSharding(num_ranks=num_ranks, rank=rank, order=order) for rank in range(num_ranks)]
        positions = [sharding.position_ids(12)[0].tolist() for sharding in shardings]
        assert positions == [sharding.shard(tokens)[0].tolist() for sharding in shardings]
        return positions

    assert parts(SequenceOrder.zigzag, 2) == [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]
    assert parts(SequenceOrder.contiguous, 2) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert parts(SequenceOrder.zigzag, 3) == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert parts(SequenceOrder.zigzag, 1) == [list(range(12))]


@BOTH
def test_joining_undoes_cutting(order: SequenceOrder):
    whole = torch.arange(2 * 12 * 3).view(2, 12, 3)
    shardings = [SequenceSharding(num_ranks=3, rank=rank, order=order) for rank in range(3)]
    parts = shardings[0].parts(whole, 1)
    assert all(torch.equal(sharding.shard(whole), part) for sharding, part in zip(shardings, parts, strict=True))
    assert torch.equal(shardings[0].join(parts, 1), whole)


def test_lengths():
    zigzag = SequenceSharding(num_ranks=2, rank=0)
    with pytest.raises(ValueError, match=r"10 tokens can not be cut into 4 .* 2 context-parallel .* such as 8 or 12\."):
        zigzag.shard(torch.zeros(1, 10))
    with pytest.raises(ValueError, match=r"3 tokens .* such as 4\."):
        zigzag.position_ids(3)
    assert [zigzag.padded_length(length) for length in (0, 1, 4, 5)] == [4, 4, 4, 8]
    assert zigzag.pad(torch.ones(1, 3, dtype=torch.long), -100).tolist() == [[1, 1, 1, -100]]
    assert zigzag.pad(torch.ones(1, 2, 3), 7.0, dim=-1)[0, 1].tolist() == [1.0, 1.0, 1.0, 7.0]
    assert zigzag.pad(torch.ones(3), 0.0, dim=0).tolist() == [1.0, 1.0, 1.0, 0.0]
    assert SequenceSharding(num_ranks=2, rank=0, order=SequenceOrder.contiguous).padded_length(5) == 6


def test_one_process_keeps_everything():
    sharding = SequenceSharding.of(DeviceMeshParameters().build())
    whole = torch.randn(2, 5)
    assert sharding.shard(whole) is whole
    assert sharding.gather(whole) is whole
    assert sharding.pad(whole, 0.0).shape == whole.shape


def test_documents():
    ids = document_ids((2, 0, 3), 7)
    assert ids.tolist() == [0, 0, 2, 2, 2, -1, -1]
    assert torch.equal(ids, document_ids(torch.tensor([0, 2, 2, 5]).diff(), 7))
    assert document_ids([1, 2]).tolist() == [0, 1, 1]
    with pytest.raises(ValueError, match=r"documents of \[2, 3\] tokens do not fit into a sequence of 4"):
        document_ids([2, 3], 4)
    with pytest.raises(ValueError, match=r"cu_seqlens\.diff"):
        document_ids([2, -1])
    mask = document_mask(torch.tensor([[0, 1]]), torch.tensor([[0, 0, 1]]))
    assert mask.shape == (1, 1, 2, 3)
    assert mask[0, 0].tolist() == [[True, True, False], [False, False, True]]


@pytest.mark.world_size(4)
@BOTH
def test_gathering(order: SequenceOrder):
    """The gradient of a part is the sum over ranks, each of which weighs the whole in its own way."""
    context = DeviceMeshParameters(context_parallel_shard=2, context_parallel_replicate=2).build()
    sharding = SequenceSharding.of(context, order)
    assert (sharding.num_ranks, sharding.rank) == (4, dist.get_rank())
    whole = torch.arange(2 * 8 * 3, dtype=torch.float64).view(2, 8, 3)
    part = sharding.shard(whole).clone().requires_grad_()
    gathered = sharding.gather(part)
    assert torch.equal(gathered, whole)
    assert torch.equal(sharding.gather(sharding.position_ids(8)), torch.arange(8).view(1, 8))
    (gathered.square() * (dist.get_rank() + 1)).sum().backward()
    torch.testing.assert_close(part.grad, sharding.shard(2 * whole) * (1 + 2 + 3 + 4))
    assert copy.deepcopy(sharding) is sharding


@pytest.mark.world_size(4)
def test_the_group_of_attention_is_no_other():
    context = DeviceMeshParameters(context_parallel_shard=2, data_parallel_replicate=2).build()
    group = context.mesh_for(BATCH_DOMAIN)["cp"].get_group()
    assert group is not context.mesh_for(DENSE_DOMAIN).get_group("dp_cp_shard")
    assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(
        context.mesh_for(DENSE_DOMAIN).get_group("dp_cp_shard")
    )
    assert group in context.groups
    with pytest.raises(ValueError, match=r"cut over one mesh dimension, got \('dp', 'cp'\)"):
        SequenceSharding.over(context.mesh_for(BATCH_DOMAIN)["dp", "cp"])
