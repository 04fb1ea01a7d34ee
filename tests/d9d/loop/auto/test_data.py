"""The automatic data stream: what its config means, the samples of each step, epochs, resuming, and refusals."""

import itertools
import os
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.protocol import MicrobatchPackStream
from d9d.core.types import IdleMicrobatch
from d9d.dataset import ShardIndexingMode
from d9d.dataset.lanes import ElasticMapStream, Permutation, add_weights
from d9d.dataset.pack_stream import has_rank_invariant_state, needs_main_thread, sample_count_of, sample_digest_of
from d9d.loop.auto import AutoDataConfig, AutoDataProvider
from d9d.loop.auto.data import build_data_plan
from d9d.loop.control import InitializeDataProviderContext


class Numbers(Dataset):
    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> int:
        return index


class Seeded(Numbers):
    def getitem_seeded(self, index: int, seed: int) -> int:
        return index


def config(**changes: object) -> AutoDataConfig:
    return AutoDataConfig.model_validate(
        {"global_batch_size": 8, "microbatch_size": 2, "num_workers": 0, "pin_memory": False, **changes}
    )


def provide(dataset: object, settings: AutoDataConfig, mesh: DeviceMeshParameters | None = None, **options):
    dataset = Numbers(dataset) if isinstance(dataset, int) else dataset
    provider = AutoDataProvider(lambda dist_context: dataset, list, settings, **options)  # type: ignore[return-value,arg-type]
    return provider(InitializeDataProviderContext(dist_context=(mesh or DeviceMeshParameters()).build()))


def stream(num_samples: int, settings: AutoDataConfig, dp_size: int = 1, dp_rank: int = 0) -> ElasticMapStream:
    """The stream of one rank out of `dp_size`, without the others."""
    plan = build_data_plan(settings, num_samples)
    return ElasticMapStream(Numbers(num_samples), list, plan, dp_size=dp_size, dp_rank=dp_rank)


def steps_over_ranks(num_samples: int, settings: AutoDataConfig, dp_size: int) -> list[list[list[int]]]:
    """The microbatches of each step over all ranks that are not idle."""
    ranks = [stream(num_samples, settings, dp_size, dp_rank) for dp_rank in range(dp_size)]
    return [
        [microbatch for pack in step for microbatch in pack if not isinstance(microbatch, IdleMicrobatch)]
        for step in zip(*ranks, strict=True)
    ]


def flat(steps: list[list[list[int]]]) -> list[int]:
    return sorted(sample for step in steps for microbatch in step for sample in microbatch)


def take(packs: MicrobatchPackStream, count: int) -> list[Sequence[object]]:
    return list(itertools.islice(packs, count))


# 35 samples in steps of 8: 4 whole ones, and 3 samples that do not fill another.
@pytest.mark.parametrize("mode", ShardIndexingMode)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("drop_last", "num_steps", "num_samples"), [(True, 4, 32), (False, 5, 35)])
def test_microbatches_do_not_depend_on_the_number_of_ranks(mode, shuffle, drop_last, num_steps, num_samples):
    settings = config(shuffle=shuffle, num_epochs=2, drop_last=drop_last, shard_indexing_mode=mode)
    whole = steps_over_ranks(35, settings, 1)
    for epoch in (whole[:num_steps], whole[num_steps:]):
        assert len(set(flat(epoch))) == len(flat(epoch)) == num_samples
    assert len(whole) == 2 * num_steps
    assert steps_over_ranks(35, settings, 2) == steps_over_ranks(35, settings, 4) == whole


def test_each_epoch_is_shuffled_by_its_own_permutation():
    steps = steps_over_ranks(8, config(shuffle=True, seed=5, num_epochs=2, global_batch_size=4), 1)
    expected = [Permutation(8, seed=5, epoch=epoch)[i] for epoch in range(2) for i in range(8)]
    assert [sample for step in steps for microbatch in step for sample in microbatch] == expected


def test_without_drop_last_a_short_step_ends_each_epoch():
    packs = stream(11, config(num_epochs=2, drop_last=False))
    assert packs.total_steps == 4
    # 11 = 8 + 3, in microbatches of 2.
    epoch = [([0, 1], [2, 3], [4, 5], [6, 7]), ([8, 9], [10])]
    assert list(packs) == epoch * 2


@pytest.mark.parametrize("num_samples", [1, 3, 7])
def test_a_dataset_smaller_than_a_step_is_one_short_step(num_samples):
    for dp_size in (1, 2, 4):
        assert flat(steps_over_ranks(num_samples, config(drop_last=False), dp_size)) == list(range(num_samples))


@pytest.mark.parametrize(
    ("changes", "first_samples"),
    [
        ({"tail": "wrap", "num_epochs": 4}, [0, 8, 5, 2, 10]),
        ({"tail": "wrap", "num_epochs": 2, "global_batch_ramp": {2: 4, 3: 8}}, [0, 8, 1]),
        ({"drop_last": False, "num_epochs": 2}, [0, 8, 0, 8]),
        ({"num_epochs": 2}, [0, 0]),
        ({"num_epochs": 2, "skip_steps": [[2, 2]]}, [0]),
        ({"tail": "wrap", "num_epochs": 3, "skip_steps": [[2, 3]]}, [0, 2]),
    ],
    ids=str,
)
def test_what_the_config_says_of_steps(changes, first_samples):
    packs = stream(11, config(**changes))
    assert packs.total_steps == len(first_samples)
    assert [pack[0][0] for pack in packs] == first_samples


def test_without_a_number_of_epochs_the_stream_has_no_end():
    packs = stream(8, config(num_epochs=None))
    assert packs.total_steps is None
    assert take(packs, 5)[4] == ([0, 1], [2, 3], [4, 5], [6, 7])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_provider_builds_the_stream_of_one_process(num_workers):
    packs = provide(16, config(pin_memory=True, num_workers=num_workers))
    assert packs.total_steps == 2
    count_of = sample_count_of(packs)
    assert count_of is not None
    assert count_of(2) == 16
    assert has_rank_invariant_state(packs)
    assert sample_digest_of(packs) is not None
    assert list(packs)[1] == ([8, 9], [10, 11], [12, 13], [14, 15])


@pytest.mark.parametrize(
    ("dataset", "changes", "expected"),
    [
        (Numbers(8), {}, True),
        (Numbers(8), {"seeds_generators": False}, False),
        (Numbers(8), {"num_workers": 1}, False),
        (Seeded(8), {}, False),
        (Seeded(8), {"seeds_generators": True}, True),
    ],
)
def test_only_what_seeds_global_generators_needs_the_main_thread(dataset, changes, expected):
    assert needs_main_thread(provide(dataset, config(**changes))) == expected


def test_padding_needs_somebody_who_attaches_weights():
    with pytest.raises(ValueError, match="give attach_weights"):
        provide(11, config(tail="pad"))
    dataset = [{"x": torch.tensor(i)} for i in range(11)]
    provider = AutoDataProvider(lambda ctx: dataset, dict_of_samples, config(tail="pad"), add_weights)  # type: ignore[arg-type,return-value]
    packs = list(provider(InitializeDataProviderContext(dist_context=DeviceMeshParameters().build())))
    weights = [weight for pack in packs for microbatch in pack for weight in microbatch["sample_weight"].tolist()]
    assert weights == [1.0] * 11 + [0.0] * 5


def dict_of_samples(samples: list) -> dict:
    return {"samples": samples}


@pytest.mark.world_size(4)
def test_the_provider_deals_out_by_data_coordinate():
    packs = provide(16, config(), DeviceMeshParameters(data_parallel_replicate=2, context_parallel_shard=2))
    expected = [([0, 1], [2, 3]), ([4, 5], [6, 7])][dist.get_rank() // 2]
    assert next(iter(packs)) == expected


# -- fingerprints


class ProcessNames(Numbers):
    """Appends the process that loads a sample to a file."""

    def __init__(self, num_samples: int, path) -> None:
        super().__init__(num_samples)
        self.path = path

    def __getitem__(self, index: int) -> int:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_are_probed_where_they_are_loaded_later(tmp_path, num_workers):
    dataset = ProcessNames(8, tmp_path / "processes")
    packs = provide(dataset, config(num_workers=num_workers))
    state = packs.state_dict()
    assert state["fingerprint"] != ""
    loaded_here = dataset.path.read_text().split().count(str(os.getpid()))
    assert loaded_here == (8 if num_workers == 0 else 0)
    # How it was taken makes no difference.
    assert state == provide(dataset, config(num_workers=1 - num_workers)).state_dict()


def test_without_fingerprint_nothing_is_loaded(tmp_path):
    packs = provide(ProcessNames(8, tmp_path / "processes"), config(fingerprint=False))
    assert packs.state_dict()["fingerprint"] == ""
    assert not (tmp_path / "processes").exists()


def test_other_samples_of_the_same_number_are_refused():
    class Doubled(Numbers):
        def __getitem__(self, index: int) -> int:
            return 2 * index

    state = provide(Numbers(16), config()).state_dict()
    with pytest.raises(ValueError, match=r"Changed: fingerprint \(checkpoint: .*, now: "):
        provide(Doubled(16), config()).load_state_dict(state)


@pytest.mark.world_size(2)
def test_all_ranks_take_the_fingerprint_of_the_first():
    class OfRank(Numbers):
        def fingerprint(self) -> str:
            return f"rank {dist.get_rank()}"

    packs = provide(OfRank(16), config(), DeviceMeshParameters(data_parallel_shard=2))
    assert packs.state_dict()["fingerprint"] == "rank 0"


@pytest.mark.world_size(2)
def test_a_sample_that_cannot_be_probed_fails_on_all_ranks():
    class Broken(Numbers):
        def fingerprint(self) -> str:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="on rank 0 of 2: the disk is gone"):
        provide(Broken(16), config(), DeviceMeshParameters(data_parallel_shard=2))


# -- refusals


@pytest.mark.world_size(2)
def test_datasets_of_different_sizes_are_refused_on_all_ranks():
    with pytest.raises(ValueError, match=r"on rank 1 of 2: the dataset has 17 samples here, but 16 on rank 0"):
        provide(16 + dist.get_rank(), config(), DeviceMeshParameters(data_parallel_shard=2))


@pytest.mark.world_size(2)
def test_a_global_batch_that_does_not_fit_the_ranks_is_refused():
    with pytest.raises(ValueError, match=r"\(2 \* 4 = 8\)\. Use 8 or 16"):
        provide(16, config(global_batch_size=12, microbatch_size=4), DeviceMeshParameters(data_parallel_shard=2))


@pytest.mark.parametrize(
    ("changes", "dp_size", "message"),
    [
        ({}, 4, None),
        ({}, 3, r"\(3 \* 2 = 6\)\. Use 6 or 12"),
        ({"lanes": 2}, 4, r"data-parallel size \(4\) does not divide the number of lanes \(2\)\. Use one of 1, 2"),
        (
            {"tail": "wrap", "global_batch_ramp": {5: 12}},
            4,
            r"global_batch_size \(12\) is not a multiple .*Use 8 or 16",
        ),
    ],
)
def test_a_mesh_is_checked_without_data(changes, dp_size, message):
    provider = AutoDataProvider(lambda ctx: Numbers(1), list, config(**changes))
    problems = provider.mesh_problems(DeviceMeshParameters(data_parallel_shard=dp_size))
    if message is None:
        assert problems == []
    else:
        with pytest.raises(ValueError, match=message):
            raise ValueError(*problems)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lanes": 3}, r"lanes \(3\) does not divide the 4 microbatches per step.*Use one of 1, 2, 4"),
        ({"global_batch_ramp": {3: 16}}, "a ramp of the global batch size needs tail 'wrap', not 'drop'"),
        ({"tail": "wrap", "global_batch_ramp": {0: 16}}, "the ramp .* must start at step 1"),
        (
            {"tail": "wrap", "global_batch_ramp": {3: 9}},
            r"\(9\) from step 3 is not a multiple of microbatch_size \(2\)",
        ),
        ({"tail": "wrap", "shard_indexing_mode": "chunked"}, "chunks need epochs that end with a step"),
        ({"skip_steps": [[4, 3]]}, "steps 4 to 3 is not a range of steps"),
        ({"tail": "short", "drop_last": True}, r"drop_last \(True\) contradicts tail \('short'\)"),
        (
            {"tail": "drop", "drop_last": False, "timeout": 1},
            r"drop_last \(False\) contradicts.*; timeout \(1.0\) needs",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_a_dataset_smaller_than_a_step_is_refused():
    with pytest.raises(ValueError, match="7 samples, fewer than one global batch"):
        provide(7, config())


def test_streaming_data_is_refused_with_the_way_out():
    class Endless(IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(TypeError, match="MicrobatchPackStream"):
        provide(Endless(), config())
