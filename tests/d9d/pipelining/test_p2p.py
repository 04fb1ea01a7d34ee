"""Transfers between ranks, and the buffers that they fill."""

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.pipelining.p2p import (
    MAX_SENDS_IN_FLIGHT,
    BatchedTransport,
    BufferPool,
    DirectTransport,
    PeerLostError,
    Transport,
    build_transport,
    close_group,
)

CPU = torch.device("cpu")
TRANSPORTS = pytest.mark.parametrize("transport_type", [DirectTransport, BatchedTransport])


def pipeline_group() -> dist.ProcessGroup:
    return DeviceMeshParameters(pipeline_parallel=dist.get_world_size()).build().pipeline_group


# Transports; the batched one is for accelerators, but gloo can run batches too


@pytest.mark.world_size(2, timeout_s=15)
@TRANSPORTS
def test_tensors_arrive_in_the_order_of_the_calls(transport_type: Callable[[dist.ProcessGroup], Transport]):
    transport: Transport = transport_type(pipeline_group())
    sent = [[torch.full((n,), float(n)) for n in sizes] for sizes in ((3,), (1, 2), (4,), (), (2,))]
    if dist.get_rank() == 0:
        for tensors in sent:
            transport.send(tensors, 1, 0)
    else:
        received = [[torch.empty_like(tensor) for tensor in tensors] for tensors in sent]
        transfers = [transport.receive(tensors, 0, 0) for tensors in received]
        for transfer in transfers:
            transfer.wait()
        assert [[tensor.tolist() for tensor in tensors] for tensors in received] == [
            [tensor.tolist() for tensor in tensors] for tensors in sent
        ]
    transport.finish()


@pytest.mark.world_size(2, timeout_s=15)
@TRANSPORTS
def test_both_ranks_may_send_first(transport_type: Callable[[dist.ProcessGroup], Transport]):
    transport: Transport = transport_type(pipeline_group())
    peer = 1 - dist.get_rank()
    large = 2**20  # more than a socket takes without a reader
    received = torch.empty(large)
    transport.send([torch.full((large,), float(dist.get_rank()))], peer, 0)
    transfer = transport.receive([received], peer, 0)
    transport.flush()
    transfer.wait()
    transport.finish()
    assert received.eq(peer).all()


@pytest.mark.world_size(2, timeout_s=15)
@TRANSPORTS
def test_few_sent_tensors_are_kept(transport_type: Callable[[dist.ProcessGroup], Transport]):
    transport: Transport = transport_type(pipeline_group())
    sent: list[weakref.ref[torch.Tensor]] = []
    for _ in range(20):
        tensor = torch.ones(8)
        if dist.get_rank() == 0:
            sent.append(weakref.ref(tensor))
            transport.send([tensor], 1, 0)
            del tensor
        else:
            transport.receive([tensor], 0, 0).wait()
        transport.flush()
        assert sum(each() is not None for each in sent) <= MAX_SENDS_IN_FLIGHT
    transport.finish()
    gc.collect()
    assert all(each() is None for each in sent)


@pytest.mark.world_size(4)
def test_a_group_that_one_rank_closes_ends_the_waits_of_all():
    group = pipeline_group()
    transport = build_transport(group, CPU)
    rank = dist.get_rank()
    start = time.perf_counter()
    if rank == 2:
        time.sleep(0.2)
        close_group(group, CPU)
    else:
        # 0 waits for 1, which waits for 2, and 3 for 2: each one that notices closes the group in turn.
        peer = {0: 1, 1: 2, 3: 2}[rank]
        with pytest.raises(PeerLostError):
            transport.receive([torch.empty(4)], peer, 0).wait()
        close_group(group, CPU)
    assert time.perf_counter() - start < 10.0
    dist.barrier()  # other groups are not concerned


@pytest.mark.world_size(2)
def test_sends_to_a_lost_peer_fail():
    group = pipeline_group()
    transport = build_transport(group, CPU)
    if dist.get_rank() == 1:
        close_group(group, CPU)
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(PeerLostError):
            send_much(transport)
        with pytest.raises(PeerLostError):
            transport.receive([torch.empty(4)], 1, 0).wait()


def send_much(transport: Transport) -> None:
    for _ in range(10):
        transport.send([torch.ones(2**20)], 1, 0)


def test_the_transport_fits_the_device():
    group = object()  # not used before the first transfer
    assert isinstance(build_transport(group, CPU), DirectTransport)  # pyright: ignore[reportArgumentType]
    assert isinstance(build_transport(group, torch.device("meta")), BatchedTransport)  # pyright: ignore[reportArgumentType]


# Buffers


def test_a_buffer_is_used_again():
    pool = BufferPool(CPU)
    first = pool.take((2, 3), torch.float64)
    place = first.data_ptr()
    pool.give_back([first])
    del first
    again = pool.take((2, 3), torch.float64)
    assert (again.data_ptr(), again.shape, again.dtype) == (place, (2, 3), torch.float64)
    assert pool.take((2, 3), torch.float64).data_ptr() != place


def test_a_buffer_serves_from_one_step_to_the_next():
    pool = BufferPool(CPU)
    places = set()
    for _ in range(5):
        buffers = [pool.take((4,), torch.float32) for _ in range(3)]
        places |= {buffer.data_ptr() for buffer in buffers}
        pool.give_back(buffers)
        del buffers
        pool.end_step()
    assert len(places) == 3


@pytest.mark.parametrize(
    "keep",
    [lambda buffer: buffer, lambda buffer: buffer.detach(), lambda buffer: buffer[:1], lambda buffer: buffer.numpy()],
    ids=["itself", "an alias", "a view", "an array"],
)
def test_what_somebody_keeps_is_not_handed_out(keep: Callable[[torch.Tensor], Any]):
    pool = BufferPool(CPU)
    buffer = pool.take((4,), torch.float32)
    kept = keep(buffer.detach())
    place = buffer.data_ptr()
    pool.give_back([buffer])
    del buffer
    others = [pool.take((4,), torch.float32) for _ in range(2)]
    assert place not in [other.data_ptr() for other in others]
    assert len(kept) > 0


def test_shapes_and_types_do_not_mix():
    pool = BufferPool(CPU)
    pool.give_back([pool.take((2, 3), torch.float64)])
    for shape, dtype in [((3, 2), torch.float64), ((6,), torch.float64), ((2, 3), torch.int64)]:
        taken = pool.take(shape, dtype)
        assert (taken.shape, taken.dtype) == (shape, dtype)


def test_tensors_of_inference_mode_are_not_used_for_training():
    pool = BufferPool(CPU)
    with torch.inference_mode():
        pool.give_back([pool.take((2,), torch.float32)])
        assert pool.take((2,), torch.float32).is_inference()
        pool.give_back([pool.take((2,), torch.float32)])
    training = pool.take((2,), torch.float32)
    assert not training.is_inference()
    pool.give_back([training])
    del training
    with torch.inference_mode():
        assert pool.take((2,), torch.float32).is_inference()


def test_what_a_step_has_not_needed_is_freed():
    pool = BufferPool(CPU)
    buffer = pool.take((7,), torch.float32)
    freed = weakref.ref(buffer)
    pool.give_back([buffer])
    del buffer
    pool.end_step()
    assert freed() is not None
    pool.end_step()
    assert freed() is None
