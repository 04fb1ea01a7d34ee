"""Shards of a dataset, and views sorted by length."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from d9d.core.dist_context import DeviceMeshParameters
from d9d.dataset import BufferSortedDataset, ShardedDataset, ShardIndexingMode, shard_dataset_data_parallel

MODES = list(ShardIndexingMode)


class Numbers(Dataset):
    """Sample i is i; its length repeats with period 7."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        return index

    def sort_key(self, index: int) -> int:
        return index % 7


def shards(num_samples: int, total: int, mode: ShardIndexingMode, pad: bool) -> list[list[int]]:
    return [list(ShardedDataset(Numbers(num_samples), total, shard, mode, pad)) for shard in range(total)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("total", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("num_samples", [1, 2, 7, 9, 16, 23])
def test_shards_without_padding_hold_each_sample_once(num_samples, total, mode):
    parts = shards(num_samples, total, mode, pad=False)
    assert sorted(sample for part in parts for sample in part) == list(range(num_samples))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("total", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("num_samples", [1, 2, 7, 9, 16, 23])
def test_padded_shards_are_of_equal_size_and_miss_nothing(num_samples, total, mode):
    parts = shards(num_samples, total, mode, pad=True)
    assert {len(part) for part in parts} == {-(-num_samples // total)}
    assert {sample for part in parts for sample in part} == set(range(num_samples))


def test_nine_samples_in_eight_chunks():
    parts = shards(9, 8, ShardIndexingMode.chunked, pad=False)
    assert parts == [[0, 1], [2], [3], [4], [5], [6], [7], [8]]


def test_sequential_shards_take_turns():
    assert shards(5, 2, ShardIndexingMode.sequential, pad=False) == [[0, 2, 4], [1, 3]]


def test_padding_repeats_samples_from_the_start():
    assert shards(5, 2, ShardIndexingMode.sequential, pad=True) == [[0, 2, 4], [1, 3, 0]]
    assert shards(5, 2, ShardIndexingMode.chunked, pad=True) == [[0, 1, 2], [3, 4, 0]]


def test_indices_outside_a_shard_are_refused():
    shard = ShardedDataset(Numbers(5), 2, 1, ShardIndexingMode.sequential, False)
    assert (shard[-1], shard[1]) == (3, 3)
    with pytest.raises(IndexError, match="index 2 is outside a shard of 2"):
        shard[2]


@pytest.mark.parametrize(
    ("total", "shard", "message"), [(0, 0, "total_shards"), (2, 2, "from 0 to 1"), (2, -1, "from 0 to 1")]
)
def test_a_shard_that_is_not_there_is_refused(total, shard, message):
    with pytest.raises(ValueError, match=message):
        ShardedDataset(Numbers(4), total, shard, ShardIndexingMode.sequential, True)


def test_the_state_of_another_shard_is_refused_by_name():
    saved = ShardedDataset(Numbers(5), 2, 0, ShardIndexingMode.sequential, True).state_dict()
    other = ShardedDataset(Numbers(6), 2, 0, ShardIndexingMode.sequential, True)
    with pytest.raises(ValueError, match=r"num_samples \(checkpoint: 5, now: 6\)"):
        other.load_state_dict(saved)


@pytest.mark.world_size(4)
def test_ranks_with_one_data_coordinate_share_a_shard():
    dist_context = DeviceMeshParameters(data_parallel_shard=2, tensor_parallel=2).build()
    shard = shard_dataset_data_parallel(Numbers(4), dist_context)
    # The tensor dimension is the innermost: ranks 0 and 1 are peers, and so are 2 and 3.
    assert list(shard) == [[0, 2], [0, 2], [1, 3], [1, 3]][dist_context.rank]


def sorted_view(num_samples: int = 100, seed: int | None = None) -> BufferSortedDataset:
    return BufferSortedDataset(Numbers(num_samples), buffer_size=40, pack_size=8, init_seed=seed)


def test_each_sample_appears_once_in_a_sorted_view():
    assert sorted(sorted_view()) == list(range(100))


def test_packs_hold_neighbours_by_key():
    samples = list(sorted_view())
    for start in range(0, 80, 8):
        buffer_keys = sorted(Numbers(100).sort_key(i) for i in samples[start // 40 * 40 : start // 40 * 40 + 40])
        pack = sorted(Numbers(100).sort_key(i) for i in samples[start : start + 8])
        # A pack is a run of the sorted keys of its buffer.
        assert pack in [buffer_keys[at : at + 8] for at in range(0, 40, 8)]


def test_an_unfilled_pack_ends_its_buffer():
    # 100 = 40 + 40 + 20, and 20 = 2 * 8 + 4: the four largest keys of the last buffer come last.
    keys = [index % 7 for index in list(sorted_view())[80:]]
    assert sorted(keys[-4:]) == sorted(keys)[-4:]


def test_the_order_follows_from_the_arguments_alone():
    assert list(sorted_view()) == list(sorted_view())
    assert list(sorted_view(seed=1)) != list(sorted_view(seed=2))
    forwards, backwards = list(sorted_view()), sorted_view()
    assert [backwards[i] for i in reversed(range(100))] == forwards[::-1]


@pytest.mark.world_size(2)
def test_ranks_agree_on_the_order_without_a_seed():
    # The recipe of the documentation: sort, then shard. Each rank must see the part that the others do not.
    dist_context = DeviceMeshParameters(data_parallel_replicate=2).build()
    own = torch.tensor(list(shard_dataset_data_parallel(sorted_view(), dist_context)))
    parts = [torch.empty_like(own) for _ in range(2)]
    torch.distributed.all_gather(parts, own)
    assert sorted(torch.cat(parts).tolist()) == list(range(100))


def test_a_sorted_view_can_be_sent_to_loader_workers():
    copied = pickle.loads(pickle.dumps(sorted_view()))  # noqa: S301 - made on the line itself
    assert list(copied) == list(sorted_view())


def test_a_changed_order_is_refused():
    with pytest.raises(ValueError, match=r"init_seed \(checkpoint: 1, now: 2\)"):
        sorted_view(seed=2).load_state_dict(sorted_view(seed=1).state_dict())
    sorted_view(seed=2).load_state_dict(sorted_view(seed=2).state_dict())


@pytest.mark.parametrize(("buffer_size", "pack_size"), [(0, 1), (1, 0)])
def test_empty_buffers_and_packs_are_refused(buffer_size, pack_size):
    with pytest.raises(ValueError, match="must be at least 1"):
        BufferSortedDataset(Numbers(4), buffer_size, pack_size)


def test_shards_work_in_a_torch_loader():
    shard = ShardedDataset(Numbers(9), 2, 1, ShardIndexingMode.sequential, False)
    assert [batch.tolist() for batch in DataLoader(shard, batch_size=2)] == [[1, 3], [5, 7]]
