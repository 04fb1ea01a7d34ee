"""Packs on their way to the device: order, positions, exceptions, and the thread that reads ahead."""

import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from d9d.core.dist_context import DeviceMeshParameters
from d9d.dataset.pack_stream import sample_count_of
from d9d.loop.component.data_stream import (
    DataParallelMicrobatchPackStream,
    DevicePackStream,
    DirectDevicePackStream,
    PrefetchingDevicePackStream,
    build_device_pack_stream,
)

CPU = torch.device("cpu")


class Packs:
    """Yields packs ({"x": tensor(i), "name": str(i)},) from its position on."""

    def __init__(self, total_steps: int = 5, fails_at: int | None = None) -> None:
        self.total_steps = total_steps
        self.position = 0
        self.fails_at = fails_at
        self.readers: set[str] = set()

    def __iter__(self) -> Iterator[tuple[dict[str, Any], ...]]:
        while self.position < self.total_steps:
            self.readers.add(threading.current_thread().name)
            if self.position == self.fails_at:
                self.fail()
            self.position += 1
            yield ({"x": torch.tensor(self.position - 1), "name": str(self.position - 1)},)

    def fail(self) -> None:
        raise OSError("the disk is gone")

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class InvariantPacks(Packs):
    has_rank_invariant_state = True

    def num_samples_of(self, num_steps: int) -> int:
        return 16 * num_steps


FACTORS = [0, 1, 3]


def numbers(packs: Any) -> list[int]:
    return [pack[0]["x"].item() for pack in packs]


def wait_until_read(inner: Packs, position: int) -> None:
    deadline = time.monotonic() + 10
    while inner.position < position and time.monotonic() < deadline:
        time.sleep(0.001)


def prefetch_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "d9d-pack-prefetch"]


@pytest.mark.parametrize("factor", FACTORS)
def test_all_packs_arrive_in_order(factor):
    packs = list(build_device_pack_stream(Packs(), CPU, factor))
    assert numbers(packs) == [0, 1, 2, 3, 4]
    assert packs[2][0]["name"] == "2"
    assert not prefetch_threads()


@pytest.mark.parametrize("factor", FACTORS)
def test_the_position_is_that_of_the_last_pack_handed_out(factor):
    inner = Packs(total_steps=20)
    stream = build_device_pack_stream(inner, CPU, factor)
    assert stream.state_dict() == {"position": 0}
    iterator = iter(stream)
    for number in range(3):
        next(iterator)
        wait_until_read(inner, number + 1 + factor)
        assert stream.state_dict() == {"position": number + 1}
    iterator.close()
    assert stream.state_dict() == {"position": 3}


@pytest.mark.parametrize("factor", FACTORS)
def test_an_iteration_that_stopped_early_is_continued(factor):
    stream = build_device_pack_stream(Packs(), CPU, factor)
    iterator = iter(stream)
    assert [next(iterator)[0]["x"].item() for _ in range(2)] == [0, 1]
    iterator.close()
    assert numbers(stream) == [2, 3, 4]


@pytest.mark.parametrize("factor", FACTORS)
def test_a_loaded_position_counts(factor):
    stream = build_device_pack_stream(Packs(), CPU, factor)
    stream.load_state_dict({"position": 3})
    assert stream.state_dict() == {"position": 3}
    assert numbers(stream) == [3, 4]


@pytest.mark.parametrize("factor", [1, 2])
def test_no_more_is_read_ahead_than_asked_for(factor):
    inner = Packs(total_steps=20)
    iterator = iter(PrefetchingDevicePackStream(inner, CPU, factor))
    next(iterator)
    wait_until_read(inner, 1 + factor)
    time.sleep(0.02)  # the thread would read on by now if it could
    assert inner.position == 1 + factor
    iterator.close()
    assert not prefetch_threads()


@pytest.mark.parametrize("factor", FACTORS)
def test_an_exception_reaches_the_reader_after_the_packs_before_it(factor):
    stream = build_device_pack_stream(Packs(fails_at=2), CPU, factor)
    packs = iter(stream)
    assert numbers([next(packs), next(packs)]) == [0, 1]
    with pytest.raises(OSError, match="the disk is gone") as error:
        next(packs)
    # The traceback leads to the line that failed, in whichever thread it ran.
    assert "fail" in [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert stream.state_dict() == {"position": 2}
    assert not prefetch_threads()


@pytest.mark.parametrize(("factor", "reader"), [(0, "MainThread"), (1, "d9d-pack-prefetch")])
def test_who_reads(factor, reader):
    inner = Packs()
    list(build_device_pack_stream(inner, CPU, factor))
    assert inner.readers == {reader}


def test_a_stream_that_is_being_read_is_left_alone():
    stream = PrefetchingDevicePackStream(Packs(), CPU, 1)
    iterator = iter(stream)
    next(iterator)
    with pytest.raises(RuntimeError, match="cannot be moved"):
        stream.load_state_dict({"position": 0})
    with pytest.raises(RuntimeError, match="being read already"):
        next(iter(stream))
    iterator.close()


@pytest.mark.parametrize(
    ("factor", "kind"), [(0, DirectDevicePackStream), (1, PrefetchingDevicePackStream)], ids=["direct", "prefetch"]
)
def test_the_factor_chooses_the_stream(factor, kind: type[DevicePackStream]):
    assert isinstance(build_device_pack_stream(Packs(), "cpu", factor), kind)


def test_a_prefetching_stream_needs_a_slot():
    with pytest.raises(ValueError, match=r"prefetch_factor \(0\)"):
        PrefetchingDevicePackStream(Packs(), CPU, 0)


def test_a_position_per_rank_has_the_key_of_its_rank():
    stream = DataParallelMicrobatchPackStream(DeviceMeshParameters().build(), Packs())
    assert stream.total_steps == 5
    assert sample_count_of(stream) is None
    next(iter(stream))
    assert stream.state_dict() == {"dp_0": {"position": 1}}
    with pytest.raises(ValueError, match=r"no data position 'dp_0', only \['dp_7'\]"):
        stream.load_state_dict({"dp_7": {"position": 2}})


def test_a_position_of_all_ranks_has_one_key():
    stream = DataParallelMicrobatchPackStream(DeviceMeshParameters().build(), InvariantPacks())
    stream.load_state_dict({"all_ranks": {"position": 3}})
    assert stream.state_dict() == {"all_ranks": {"position": 3}}
    count_of = sample_count_of(stream)
    assert count_of is not None
    assert count_of(3) == 48
    assert numbers(stream) == [3, 4]


@pytest.mark.world_size(2)
def test_each_data_rank_keeps_its_position():
    dist_context = DeviceMeshParameters(data_parallel_shard=2).build()
    stream = DataParallelMicrobatchPackStream(dist_context, Packs())
    assert list(stream.state_dict()) == [f"dp_{dist_context.rank}"]
