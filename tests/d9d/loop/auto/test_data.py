"""The automatic data stream: the samples of each step, epochs, and resuming."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.protocol import MicrobatchPackStream
from d9d.dataset import ShardIndexingMode
from d9d.dataset.global_batch import GlobalBatchPlan
from d9d.dataset.pack_stream import global_batch_size_of
from d9d.loop.auto import AutoDataConfig, AutoDataProvider
from d9d.loop.auto.data import GlobalBatchPackStream
from d9d.loop.control import InitializeDataProviderContext


class Numbers(Dataset):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.num_loaded = 0

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        self.num_loaded += 1
        return index


class Noise(Dataset):
    """Samples that a loader process draws at random."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return torch.rand(()).item()


def config(**changes: object) -> AutoDataConfig:
    return AutoDataConfig.model_validate(
        {"global_batch_size": 8, "microbatch_size": 2, "num_workers": 0, "pin_memory": False, **changes}
    )


def stream(dataset: Dataset | int, settings: AutoDataConfig, dp_size: int = 1, dp_rank: int = 0):
    """The stream of one rank out of `dp_size`, without the others."""
    dataset = Numbers(dataset) if isinstance(dataset, int) else dataset
    plan = GlobalBatchPlan(
        num_samples=len(dataset),  # type: ignore[arg-type]
        global_batch_size=settings.global_batch_size,
        microbatch_size=settings.microbatch_size,
        dp_size=dp_size,
        dp_rank=dp_rank,
        mode=settings.shard_indexing_mode,
        drop_last=settings.drop_last,
    )
    return GlobalBatchPackStream(dataset, list, plan, settings)


def steps_over_ranks(num_samples: int, settings: AutoDataConfig, dp_size: int) -> list[list[int]]:
    """The samples of each step, over all ranks, in sorted order."""
    packs = [list(stream(num_samples, settings, dp_size, dp_rank)) for dp_rank in range(dp_size)]
    return [sorted(i for pack in step for microbatch in pack for i in microbatch) for step in zip(*packs, strict=True)]


def flat(steps: list[list[int]]) -> list[int]:
    return sorted(itertools.chain.from_iterable(steps))


def take(packs: MicrobatchPackStream, count: int) -> list[Sequence[object]]:
    iterator = iter(packs)
    return [next(iterator) for _ in range(count)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("dp_size", [2, 4])
def test_steps_do_not_depend_on_the_number_of_ranks(dp_size, shuffle):
    settings = config(shuffle=shuffle, num_epochs=2)
    assert steps_over_ranks(35, settings, dp_size) == steps_over_ranks(35, settings, 1)


def test_a_shuffled_epoch_over_all_ranks_holds_each_sample_once():
    steps = steps_over_ranks(32, config(shuffle=True), dp_size=4)
    assert flat(steps) == list(range(32))
    assert steps[0] != list(range(8))


def test_epochs_are_shuffled_anew():
    first, second = (steps_over_ranks(8, config(shuffle=True, num_epochs=n, global_batch_size=4), 1) for n in (1, 2))
    assert second[:2] == first
    assert flat(second[2:]) == list(range(8))
    assert second[2:] != first


@pytest.mark.parametrize(("drop_last", "num_steps"), [(True, 4), (False, 6)])
def test_the_length_counts_all_epochs(drop_last, num_steps):
    packs = stream(17, config(num_epochs=2, drop_last=drop_last))
    assert packs.total_steps == num_steps
    assert len(list(packs)) == num_steps


def test_a_short_step_does_not_run_into_the_next_epoch():
    sizes = [[len(microbatch) for microbatch in pack] for pack in stream(11, config(num_epochs=2, drop_last=False))]
    # 11 = 8 + 3, in microbatches of 2.
    assert sizes == [[2, 2, 2, 2], [2, 1], [2, 2, 2, 2], [2, 1]]


def test_without_a_number_of_epochs_the_stream_has_no_end():
    packs = stream(8, config(num_epochs=None))
    assert packs.total_steps is None
    assert take(packs, 5)[4] == ([0, 1], [2, 3], [4, 5], [6, 7])


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("position", [0, 1, 3, 4])
def test_a_resumed_stream_goes_on_with_the_next_step(position, num_workers):
    settings = config(shuffle=True, num_epochs=2, num_workers=num_workers)
    whole = list(stream(16, config(shuffle=True, num_epochs=2)))
    first = stream(16, settings)
    assert take(first, position) == whole[:position]
    resumed = stream(16, settings)
    resumed.load_state_dict(first.state_dict())
    assert list(resumed) == whole[position:]


def test_moving_to_a_position_loads_nothing():
    dataset = Numbers(800)
    packs = stream(dataset, config())
    packs.load_state_dict({**packs.state_dict(), "consumed_steps": 99})
    (last,) = packs
    assert last == ([792, 793], [794, 795], [796, 797], [798, 799])
    assert dataset.num_loaded == 8


def test_a_run_can_go_on_with_other_ranks_and_microbatches():
    before = stream(24, config(shuffle=True), dp_size=1)
    take(before, 1)
    after = [stream(24, config(shuffle=True, microbatch_size=1), dp_size=2, dp_rank=rank) for rank in range(2)]
    for packs in after:
        packs.load_state_dict(before.state_dict())
    seen = [i for packs in after for pack in packs for microbatch in pack for i in microbatch]
    assert sorted(seen) == flat(steps_over_ranks(24, config(shuffle=True), 1)[1:])


def test_the_state_is_the_same_on_all_ranks():
    ranks = [stream(24, config(), dp_size=2, dp_rank=rank) for rank in range(2)]
    for packs in ranks:
        take(packs, 2)
    assert ranks[0].state_dict() == ranks[1].state_dict()
    assert ranks[0].has_rank_invariant_state


@pytest.mark.parametrize(
    ("num_samples", "changes", "message"),
    [
        (32, {}, r"num_samples \(checkpoint: 24, now: 32\)"),
        (24, {"global_batch_size": 4}, r"global_batch_size \(checkpoint: 8, now: 4\)"),
        (24, {"seed": 7}, r"seed \(checkpoint: 0, now: 7\)"),
        (24, {"shuffle": True}, r"shuffle \(checkpoint: False, now: True\)"),
        (32, {"seed": 7}, r"seed .*num_samples"),
    ],
)
def test_a_position_that_would_mean_other_samples_is_refused(num_samples, changes, message):
    saved = stream(24, config()).state_dict()
    with pytest.raises(ValueError, match=message):
        stream(num_samples, config(**changes)).load_state_dict(saved)


def test_a_chunked_position_is_refused_on_another_number_of_ranks():
    settings = config(shard_indexing_mode=ShardIndexingMode.chunked)
    saved = stream(24, settings, dp_size=1).state_dict()
    with pytest.raises(ValueError, match=r"dp_size \(checkpoint: 1, now: 2\)"):
        stream(24, settings, dp_size=2).load_state_dict(saved)


def test_loader_processes_draw_other_numbers_on_each_rank_and_position():
    def draw(dp_rank: int, position: int) -> list[float]:
        settings = config(global_batch_size=4, num_workers=1, num_epochs=3)
        packs = stream(Noise(), settings, dp_size=2, dp_rank=dp_rank)
        packs.load_state_dict({**packs.state_dict(), "consumed_steps": position})
        return [value for microbatch in take(packs, 1)[0] for value in microbatch]

    draws = [draw(0, 0), draw(1, 0), draw(0, 2)]
    assert draw(0, 0) == draws[0]
    assert len({tuple(values) for values in draws}) == 3


def provide(dataset: object, settings: AutoDataConfig, mesh: DeviceMeshParameters | None = None):
    provider = AutoDataProvider(lambda dist_context: dataset, list, settings)  # type: ignore[return-value,arg-type]
    return provider(InitializeDataProviderContext(dist_context=(mesh or DeviceMeshParameters()).build()))


def test_the_provider_builds_the_stream_of_one_process():
    packs = provide(Numbers(16), config(pin_memory=True))
    assert packs.total_steps == 2
    assert global_batch_size_of(packs) == 8
    assert list(packs)[1] == ([8, 9], [10, 11], [12, 13], [14, 15])


@pytest.mark.world_size(4)
def test_the_provider_deals_out_by_data_coordinate():
    packs = provide(Numbers(16), config(), DeviceMeshParameters(data_parallel_replicate=2, context_parallel_shard=2))
    expected = [([0, 1], [4, 5]), ([2, 3], [6, 7])][torch.distributed.get_rank() // 2]
    assert next(iter(packs)) == expected


@pytest.mark.world_size(2)
def test_a_global_batch_that_does_not_fit_the_ranks_is_refused():
    with pytest.raises(ValueError, match=r"\(2 \* 4 = 8\)\. Use 8 or 16"):
        provide(
            Numbers(16), config(global_batch_size=12, microbatch_size=4), DeviceMeshParameters(data_parallel_shard=2)
        )


def test_a_dataset_smaller_than_a_step_is_refused():
    with pytest.raises(ValueError, match="7 samples, fewer than one global batch"):
        provide(Numbers(7), config())


def test_streaming_data_is_refused_with_the_way_out():
    class Endless(IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(TypeError, match="MicrobatchPackStream"):
        provide(Endless(), config())
