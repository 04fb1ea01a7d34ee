"""Packs of a fixed count, and their number per step."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from d9d.core.dist_context import DeviceMeshParameters
from d9d.dataset.batch_iterator import (
    FixedCountMicrobatchPacker,
    PinMemoryMicrobatchPackStream,
    num_microbatches_for_global_batch,
)
from d9d.dataset.pack_stream import has_rank_invariant_state


class CountingLoader:
    """Yields numbers from its position on."""

    def __init__(self, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < self.num_microbatches:
            self.position += 1
            yield self.position - 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class SizedLoader(CountingLoader):
    def __len__(self) -> int:
        return self.num_microbatches


@pytest.mark.parametrize(
    ("drop_last", "packs"), [(True, [(0, 1), (2, 3)]), (False, [(0, 1), (2, 3), (4,)])], ids=["drop", "keep"]
)
def test_a_last_pack_that_is_not_full(drop_last, packs):
    packer = FixedCountMicrobatchPacker(SizedLoader(5), microbatches_per_step=2, drop_last=drop_last)
    assert packer.total_steps == len(packs)
    assert list(packer) == packs


def test_a_loader_without_length_has_no_known_end():
    assert FixedCountMicrobatchPacker(CountingLoader(5), microbatches_per_step=2).total_steps is None


def test_the_position_is_after_the_pack_that_was_handed_out():
    packer = FixedCountMicrobatchPacker(SizedLoader(6), microbatches_per_step=2)
    next(iter(packer))
    resumed = FixedCountMicrobatchPacker(SizedLoader(6), microbatches_per_step=2)
    resumed.load_state_dict(packer.state_dict())
    assert list(resumed) == [(2, 3), (4, 5)]


def test_a_pack_of_no_microbatches_is_refused():
    with pytest.raises(ValueError, match=r"microbatches_per_step \(0\)"):
        FixedCountMicrobatchPacker(SizedLoader(1), microbatches_per_step=0)


def test_pinning_passes_packs_unchanged_where_it_gains_nothing():
    inner = FixedCountMicrobatchPacker(SizedLoader(2), microbatches_per_step=1)
    stream = PinMemoryMicrobatchPackStream(inner, is_supported=False)
    assert stream.total_steps == 2
    assert list(stream) == [(0,), (1,)]
    assert stream.state_dict() == {"position": 2}


def test_a_state_is_per_rank_unless_the_stream_says_otherwise():
    assert not has_rank_invariant_state(FixedCountMicrobatchPacker(SizedLoader(2), microbatches_per_step=1))


def test_the_count_per_step_on_one_rank():
    assert num_microbatches_for_global_batch(DeviceMeshParameters().build(), 12, 3) == 4


@pytest.mark.world_size(2)
def test_the_count_per_step_on_two_ranks():
    dist_context = DeviceMeshParameters(data_parallel_shard=2).build()
    assert num_microbatches_for_global_batch(dist_context, 12, 3) == 2
    with pytest.raises(ValueError, match=r"global_batch_size \(100\).*\(2 \* 3 = 6\)\. Use 96 or 102"):
        num_microbatches_for_global_batch(dist_context, 100, 3)
    with pytest.raises(ValueError, match=r"\(2 \* 3 = 6\)\. Use 6\."):
        num_microbatches_for_global_batch(dist_context, 4, 3)


@pytest.mark.parametrize(("global_batch", "micro"), [(0, 1), (1, 0), (-4, 2)])
def test_sizes_below_one_are_refused(global_batch, micro):
    with pytest.raises(ValueError, match="must be at least 1"):
        num_microbatches_for_global_batch(DeviceMeshParameters().build(), global_batch, micro)


def test_tensors_keep_their_values_through_a_pinning_stream():
    class One:
        total_steps = 1

        def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
            yield (torch.arange(3),)

    (pack,) = PinMemoryMicrobatchPackStream(One(), is_supported=False)
    assert pack[0].tolist() == [0, 1, 2]
