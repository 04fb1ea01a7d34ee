"""The collectives of the strategy, before, while and after it has groups."""

import warnings

import pytest
import torch
import torch.distributed as dist

from d9d_lightning import D9DStrategy
from tests.d9d_lightning.support import PoolEnvironment, plain_trainer


def joined(mesh):
    strategy = D9DStrategy(mesh)
    plain_trainer(strategy=strategy, devices=strategy.mesh.world_size, plugins=[PoolEnvironment()])
    assert strategy.reduce(torch.tensor(3)) == 3  # identity before the job has started
    assert strategy.distributed_sampler_kwargs == {"num_replicas": dist.get_world_size(), "rank": dist.get_rank()}
    strategy.setup_environment()
    return strategy


@pytest.mark.world_size(4)
def test_reduce():
    strategy = joined({"data_parallel_replicate": 2, "data_parallel_shard": 2})
    rank = torch.tensor(dist.get_rank() + 1)
    # Ranks hold 1, 2, 3 and 4.
    assert [strategy.reduce(rank, reduce_op=op).item() for op in ("mean", "avg", "sum", "max", "min")] == [
        2.5,
        2.5,
        10,
        4,
        1,
    ]
    assert strategy.reduce(rank, reduce_op=dist.ReduceOp.SUM) == 10
    assert rank == dist.get_rank() + 1
    assert strategy.reduce("text") == "text"
    with pytest.raises(ValueError, match="median"):
        strategy.reduce(rank, reduce_op="median")


@pytest.mark.world_size(2)
def test_a_reduction_has_no_barrier(monkeypatch):
    strategy = joined({"data_parallel_replicate": 2})
    calls = []
    for name in ("barrier", "monitored_barrier", "all_reduce"):
        collective = vars(dist)[name]
        monkeypatch.setattr(
            dist,
            name,
            lambda *args, name=name, collective=collective, **options: (
                calls.append(name) or collective(*args, **options)
            ),
        )
    assert strategy.reduce(torch.tensor(float(dist.get_rank())), reduce_op="mean") == 0.5
    assert calls == ["all_reduce"]


@pytest.mark.world_size(2)
def test_decisions_and_broadcast():
    strategy = joined({"data_parallel_shard": 2})
    is_first = dist.get_rank() == 0
    assert [strategy.reduce_boolean_decision(is_first, all=each) for each in (True, False)] == [False, True]
    assert strategy.reduce_boolean_decision(True, all=True)
    assert not strategy.reduce_boolean_decision(False, all=False)
    assert strategy.broadcast({"rank": dist.get_rank()}, src=1) == {"rank": 1}
    strategy.barrier()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_all_gather_stacks(shape):
    strategy = joined({"data_parallel_shard": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gathered = strategy.all_gather(torch.full(shape, float(dist.get_rank())))
    torch.testing.assert_close(gathered, torch.stack([torch.zeros(shape), torch.ones(shape)]))


@pytest.mark.world_size(2)
def test_all_gather_gives_gradients_back():
    strategy = joined({"data_parallel_shard": 2})
    tensor = torch.ones(3, requires_grad=True)
    weights = torch.tensor([[1.0], [10.0]]) * (dist.get_rank() + 1)
    (strategy.all_gather(tensor, sync_grads=True) * weights).sum().backward()
    # Own row's weight, summed over the ranks' losses: (1 + 2) * 1 or (1 + 2) * 10.
    torch.testing.assert_close(tensor.grad, torch.full((3,), 3.0 if dist.get_rank() == 0 else 30.0))
    assert not strategy.all_gather(tensor).requires_grad
