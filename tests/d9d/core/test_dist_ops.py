"""Gathers of every kind of shape and dtype, on ranks that hold different ones."""

import pytest
import torch
import torch.distributed as dist

from d9d.core import dist_ops

UNIFORM = {
    "scalar": torch.tensor,
    "bool": lambda rank: torch.tensor([True, rank == 0]),
    "transposed bfloat16": lambda rank: torch.arange(6, dtype=torch.bfloat16).view(2, 3).t() + rank,
    "empty": lambda rank: torch.empty(0, 3),
    "complex": lambda rank: torch.tensor([1 + 2j * rank]),
    "float8": lambda rank: torch.full((3,), float(rank)).to(torch.float8_e4m3fn),
    "requires grad": lambda rank: torch.full((2,), float(rank), requires_grad=True),
}
VARIADIC = {
    "dimensions": lambda rank: torch.full([2] * rank, float(rank)),
    "sizes": torch.arange,
    "empty on rank 0": lambda rank: torch.empty(0, 3) if rank == 0 else torch.arange(6.0).view(3, 2).t(),
    "empty everywhere": lambda rank: torch.empty(0, rank + 1),
    "bool": lambda rank: torch.ones(rank + 1, dtype=torch.bool),
}


def assert_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected, strict=True):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert torch.equal(as_bytes(left), as_bytes(right))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", UNIFORM)
def test_uniform_shapes(kind: str):
    group, rank = dist.group.WORLD, dist.get_rank()
    make = UNIFORM[kind]
    expected = [make(peer).detach() for peer in range(2)]
    assert_equal(dist_ops.all_gather(make(rank), group), expected)
    tensors, work = dist_ops.all_gather(make(rank), group, async_op=True)
    work.wait()
    assert_equal(tensors, expected)

    gathered = dist_ops.gather(make(rank), group, group_dst=1)
    later, work = dist_ops.gather(make(rank), group, group_dst=1, async_op=True)
    work.wait()
    if rank == 1:
        assert_equal(gathered, expected)
        assert_equal(later, expected)
    else:
        assert gathered is None
        assert later is None


@pytest.mark.world_size(4)
@pytest.mark.parametrize("kind", VARIADIC)
def test_different_shapes(kind: str):
    group, rank = dist.group.WORLD, dist.get_rank()
    make = VARIADIC[kind]
    expected = [make(peer) for peer in range(4)]
    assert_equal(dist_ops.all_gather_variadic_shape(make(rank), group), expected)
    tensors, work = dist_ops.all_gather_variadic_shape(make(rank), group, async_op=True)
    work.wait()
    assert_equal(tensors, expected)
    gathered = dist_ops.gather_variadic_shape(make(rank), group, group_dst=2)
    if rank == 2:
        assert_equal(gathered, expected)
    else:
        assert gathered is None


@pytest.mark.world_size(2)
def test_the_sent_tensor_may_be_changed_at_once():
    rank = dist.get_rank()
    for _ in range(20):
        tensor = torch.full((10_000 * (rank + 1),), float(rank))
        gathered = dist_ops.gather_variadic_shape(tensor, dist.group.WORLD, group_dst=0)
        tensor.fill_(-1.0)
        if gathered is not None:
            assert gathered[0].unique().tolist() == [0.0]
            assert gathered[1].unique().tolist() == [1.0]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("operation", ["all_gather_variadic_shape", "gather_variadic_shape"])
def test_all_ranks_refuse_different_dtypes(operation: str):
    tensor = torch.zeros(1, dtype=[torch.float32, torch.int8][dist.get_rank()])
    arguments = (0,) if operation == "gather_variadic_shape" else ()
    with pytest.raises(ValueError, match=r"rank 0: torch\.float32, rank 1: torch\.int8"):
        getattr(dist_ops, operation)(tensor, dist.group.WORLD, *arguments)


@pytest.mark.world_size(2)
def test_all_ranks_refuse_too_many_dimensions():
    tensor = torch.zeros([1] * (17 if dist.get_rank() == 1 else 1))
    with pytest.raises(ValueError, match="Rank 1 of the group gathers a tensor of 17 dimensions"):
        dist_ops.all_gather_variadic_shape(tensor, dist.group.WORLD)


@pytest.mark.world_size(4)
def test_ranks_of_a_group_count_within_it():
    group = dist.new_group([1, 3])
    rank = dist.get_rank()
    if rank not in (1, 3):
        return
    assert_equal(dist_ops.all_gather(torch.tensor(rank), group), [torch.tensor(1), torch.tensor(3)])
    gathered = dist_ops.gather_variadic_shape(torch.arange(rank), group, group_dst=1)
    assert (gathered is None) == (rank == 1)
    assert dist_ops.all_gather_object({"rank": rank}, group) == [{"rank": 1}, {"rank": 3}]
    assert dist_ops.gather_object(rank, group, group_dst=0) == ([1, 3] if rank == 1 else None)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("row_shape", [(), (3,), (2, 1)])
def test_exchange_rows(dtype: torch.dtype, row_shape: tuple[int, ...]):
    """Rank 0 keeps 2 rows and sends 1, rank 1 sends 3 and keeps none; then nobody sends anything to rank 1."""
    rank = dist.get_rank()
    for num_sent in (((2, 1), (3, 0)), ((1, 0), (0, 0))):
        first = [10 * rank + index for index in range(sum(num_sent[rank]))]
        rows = torch.tensor(first, dtype=torch.float32).reshape(-1, *(1 for _ in row_shape)).expand(-1, *row_shape)
        received = dist_ops.exchange_rows(
            rows.to(dtype), num_sent[rank], [counts[rank] for counts in num_sent], dist.group.WORLD
        )
        starts = [10 * peer + sum(num_sent[peer][:rank]) for peer in range(2)]
        expected = [start + index for peer, start in enumerate(starts) for index in range(num_sent[peer][rank])]
        wanted = torch.tensor(expected, dtype=torch.float32).to(dtype).float()
        assert received.dtype == dtype
        assert received.shape == (len(expected), *row_shape)
        for index, value in enumerate(wanted):
            assert received[index].float().eq(value).all()
