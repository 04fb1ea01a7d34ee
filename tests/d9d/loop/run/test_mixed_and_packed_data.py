"""Jobs on mixtures of datasets and on packed documents: through meshes with what one process reads, and by hand."""

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from d9d.core.dist_context import DeviceMeshParameters
from d9d.dataset.lanes import PackedSequence
from d9d.loop.auto import AutoDataConfig, AutoDataProvider
from tests.d9d.loop.run.regression_job import GLOBAL_BATCH_SIZE, NUM_FEATURES, Batch, build_job, build_model
from tests.d9d.loop.run.test_elastic_data import ONE_STREAM, SHARD_4, TENSOR, microbatches_of_all
from tests.harness.parity import FP64_EXACT

NUM_LANES, MICROBATCH_SIZE, NUM_STEPS = 4, 2, 7
MIXTURE = {"web": 3, "code": 1}


class Documents(Dataset[torch.Tensor]):
    """Document i holds the number of its dataset and i, i % 5 + 1 times."""

    def __init__(self, first: int, num_documents: int) -> None:
        self.first = first
        self.num_documents = num_documents

    def __len__(self) -> int:
        return self.num_documents

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index % 5 + 1,), self.first + index)


class NoisyDocuments(Documents):
    """Some of their tokens are drawn from a global generator."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 1000 * torch.randint(10, (index % 5 + 1,))


def batch_of(rows: list[torch.Tensor]) -> Batch:
    tokens = torch.stack([torch.nn.functional.pad(row, (0, NUM_FEATURES - len(row)), value=-1) for row in rows])
    x = tokens.double() / 1000
    return Batch(tokens, x, x.sum(1, keepdim=True))


def collate_packed(sequences: list[PackedSequence]) -> Batch:
    assert all(sum(sequence.lengths) == len(sequence.tokens) for sequence in sequences)
    return batch_of([sequence.tokens for sequence in sequences])


def provider(*, documents: type[Documents] = Documents, **changes: Any) -> AutoDataProvider:
    config = AutoDataConfig.model_validate(
        {
            "global_batch_size": GLOBAL_BATCH_SIZE,
            "microbatch_size": MICROBATCH_SIZE,
            "num_workers": 0,
            "lanes": NUM_LANES,
            "tail": "wrap",
            "num_epochs": None,
            **changes,
        }
    )

    def build(context: object) -> Any:
        datasets = {"web": documents(0, 23), "code": documents(100, 9)}
        return datasets if config.mixture else datasets["web"]

    return AutoDataProvider(build, batch_of if config.packing is None else collate_packed, config)


def through_meshes(
    tmp_path, data: AutoDataProvider, meshes: dict[int, DeviceMeshParameters], done: int = 0
) -> list[list[Any]]:
    """Train up to each step on a mesh, resume on the next one, and return the microbatches of all steps."""
    steps = []
    for until, mesh in meshes.items():
        overrides = {"checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": "last_step"}}
        job = build_job(mesh, tmp_path / str(until), total_steps=until, data_provider=data, overrides=overrides)
        job.trainer.train()
        steps.extend(microbatches_of_all(job.task, mesh, until - done))
        done = until
    return steps


def packed_by_hand() -> list[list[Any]]:
    """Lane l has the documents l, l + 4, l + 8, ... behind each other, cut every six tokens."""
    per_lane = GLOBAL_BATCH_SIZE // NUM_LANES
    lanes = []
    for lane in range(NUM_LANES):
        documents = [(4 * number + lane) % 23 for number in range(NUM_STEPS * per_lane * NUM_FEATURES)]
        tokens = [index for index in documents for _ in range(index % 5 + 1)]
        lanes.append([tokens[at : at + NUM_FEATURES] for at in range(0, len(tokens), NUM_FEATURES)])
    return [
        [
            lane[at : at + MICROBATCH_SIZE]
            for lane in lanes
            for at in range(step * per_lane, (step + 1) * per_lane, MICROBATCH_SIZE)
        ]
        for step in range(NUM_STEPS)
    ]


@pytest.mark.world_size(4)
def test_packed_documents_go_through_meshes(tmp_path):
    data = provider(packing={"kind": "wrap", "num_tokens": NUM_FEATURES})
    steps = through_meshes(tmp_path, data, {2: TENSOR, 4: SHARD_4, 5: ONE_STREAM, NUM_STEPS: TENSOR})
    assert steps == packed_by_hand()


@pytest.mark.world_size(4)
def test_packed_documents_go_through_meshes_with_loader_processes(tmp_path):
    steps, done = [], 0
    for workers, (until, mesh) in zip([1, 0, 2], {2: TENSOR, 4: SHARD_4, NUM_STEPS: ONE_STREAM}.items(), strict=True):
        data = provider(packing={"kind": "wrap", "num_tokens": NUM_FEATURES}, num_workers=workers)
        steps += through_meshes(tmp_path, data, {until: mesh}, done)
        done = until
    assert steps == packed_by_hand()


def test_packed_documents_train_as_plain_pytorch_does(tmp_path):
    data = provider(packing={"kind": "wrap", "num_tokens": NUM_FEATURES})
    job = build_job(DeviceMeshParameters(), tmp_path, total_steps=NUM_STEPS, data_provider=data)
    job.trainer.train()
    model = build_model(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for number, step in enumerate(packed_by_hand()):
        optimizer.param_groups[0]["lr"] = 0.05 * (1.0 - 0.9 * number / NUM_STEPS)
        x = torch.tensor(step, dtype=torch.float64).reshape(-1, NUM_FEATURES) / 1000
        loss = (model(x, None) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    assert list(job.losses().values()) == pytest.approx(losses, rel=0, abs=FP64_EXACT)


@pytest.mark.world_size(1)
def test_packed_steps_are_jumped_over(tmp_path):
    options = {"packing": {"kind": "wrap", "num_tokens": NUM_FEATURES}}
    through_meshes(tmp_path, provider(**options), {1: DeviceMeshParameters()})
    skipping = provider(**options, skip_steps=[[2, 3]])
    steps = through_meshes(tmp_path, skipping, {NUM_STEPS - 2: DeviceMeshParameters()}, done=1)
    assert steps == packed_by_hand()[3:]


BEST_FIT = {"kind": "best_fit", "num_tokens": NUM_FEATURES, "buffer_size": 5}


@pytest.mark.world_size(4)
@pytest.mark.parametrize("documents", [Documents, NoisyDocuments])
@pytest.mark.parametrize("packing", [None, BEST_FIT], ids=["samples", "packed"])
def test_mixtures_go_through_meshes(tmp_path, documents, packing):
    data = provider(documents=documents, mixture=MIXTURE, packing=packing, shuffle=True)
    steps = through_meshes(tmp_path / "meshes", data, {2: TENSOR, 4: SHARD_4, 5: ONE_STREAM, NUM_STEPS: TENSOR})
    assert steps == through_meshes(tmp_path / "one", data, {NUM_STEPS: ONE_STREAM})
    rows = [row for step in steps for microbatch in step for row in microbatch]
    # Packed sequences hold documents of one dataset only.
    from_code = [row[0] % 1000 >= 100 for row in rows]
    assert len(rows) == NUM_STEPS * GLOBAL_BATCH_SIZE
    assert sum(from_code) == len(rows) // 4
    for row, is_code in zip(rows, from_code, strict=True):
        assert all((token % 1000 >= 100) == is_code for token in row if token >= 0)


@pytest.mark.world_size(1)
def test_samples_of_a_mixture_come_in_the_order_of_their_datasets(tmp_path):
    steps = through_meshes(tmp_path, provider(mixture=MIXTURE), {NUM_STEPS: DeviceMeshParameters()})
    firsts = [row[0] for step in steps for microbatch in step for row in microbatch]
    web, code = [first for first in firsts if first < 100], [first - 100 for first in firsts if first >= 100]
    assert web == [number % 23 for number in range(84)]
    assert code == [number % 9 for number in range(28)]


@pytest.mark.world_size(1)
@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            {},
            {"packing": {**BEST_FIT, "num_tokens": 5}},
            r"mixture and packing \(checkpoint: none, now: kind=best_fit num_tokens=5",
        ),
        (
            {"packing": BEST_FIT},
            {"packing": {**BEST_FIT, "buffer_size": 4}},
            "mixture and packing .*buffer_size=5, now: .*buffer_size=4",
        ),
        (
            {"mixture": MIXTURE},
            {"mixture": {**MIXTURE, "web": 4}},
            r"mixture and packing .*3 of web \(23\).*now: .*4 of web",
        ),
        ({"packing": BEST_FIT}, {"packing": BEST_FIT, "lanes": 2}, r"Changed: lanes \(checkpoint: 4, now: 2\)"),
    ],
)
def test_other_mixtures_and_packing_are_refused(tmp_path, before, now, message):
    options = {"fingerprint": False, "shuffle": True}
    through_meshes(tmp_path, provider(**before, **options), {1: DeviceMeshParameters()})
    with pytest.raises(ValueError, match=message):
        through_meshes(tmp_path, provider(**now, **options), {2: DeviceMeshParameters()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixture": MIXTURE, "num_epochs": 1}, r"num_epochs \(1\) does not go with mixture, which has no end"),
        ({"packing": BEST_FIT, "tail": None}, r"tail \(None\) does not go with packing.*set 'wrap'"),
        ({"mixture": {"web": 0}}, r"the weight of 'web' \(0\) must be at least 1"),
        ({"mixture": MIXTURE, "num_samples": 5}, r"num_samples \(5\) .*several datasets"),
        (
            {"packing": {"kind": "first_fit", "num_tokens": 4}},
            r"kind is 'first_fit', which is unknown\. Did you mean 'best_fit'",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        provider(**changes)


@pytest.mark.parametrize(
    ("built", "mixture", "message"),
    [
        (Documents(0, 3), MIXTURE, r"draws from code, web, but dataset_factory returned a Documents"),
        ({"web": Documents(0, 3)}, MIXTURE, r"returned the datasets web, and data\.mixture has weights for code, web"),
        ({"train": Documents(0, 3), "test": Documents(0, 3)}, {}, "returned the datasets test, train, and .* for none"),
    ],
)
def test_datasets_that_are_not_those_of_the_mixture_are_refused(tmp_path, built, mixture, message):
    data = provider(mixture=mixture)
    data._dataset_factory = lambda context: built
    with pytest.raises(ValueError, match=message):
        build_job(DeviceMeshParameters(), tmp_path, data_provider=data)
