"""Evaluation counts each sample once, whatever their number, and no rank waits for another one."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)
from torchmetrics.classification import BinaryAUROC

from d9d_lightning.data.evaluation_loaders import SplitLastBatch
from tests.d9d_lightning.support import Regression, build_trainer, full, seeded

REPLICAS, SHARDS = {"data_parallel_replicate": 2}, {"data_parallel_shard": 2}
AUROC = 0.772727
"""Of 21 scores and labels from one generator with seed 0, on one process; 0.752066 with a sample counted twice."""


class Evaluates(Regression):
    """Ranks the scores of samples that carry their index in the first feature."""

    def __init__(self):
        super().__init__()
        self.auroc = BinaryAUROC()
        self.sizes, self.seen = [], []

    def evaluate(self, batch, name):
        x, score, label = batch
        self(x.double())  # what gathers shards
        self.sizes.append(len(x))
        self.seen.extend(x[:, 0].long().tolist())
        self.auroc.update(score, label)
        self.log(name, self.auroc)
        self.log(f"{name}_mean", score.mean(), sync_dist=True)

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0].double(), batch[1].double()), batch_idx)

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def predict_step(self, batch, batch_idx):
        return batch[0][:, 0].long() + 0 * self(batch[0].double()).long()


class Threes(BatchSampler):
    """A batch sampler of the user's, which Lightning builds anew around its sampler."""

    def __init__(self, sampler, batch_size=3, drop_last=False):
        super().__init__(sampler, batch_size, drop_last)


def samples(num_samples=21):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(num_samples, generator=generator)
    labels = (torch.rand(num_samples, generator=generator) < scores).long()
    x = torch.zeros(num_samples, 6)
    x[:, 0] = torch.arange(num_samples)
    return TensorDataset(x, scores, labels)


def trainer_on(mesh, **options):
    return build_trainer(mesh, use_distributed_sampler=True, **options)


def of_all_ranks(value):
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, value)
    return everywhere


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [REPLICAS, SHARDS], ids=str)
@pytest.mark.parametrize("batch_size", [1, 4, 5, 32])
def test_no_sample_counts_twice(mesh, batch_size):
    """11 samples and 10: with batches of 1 they differ in number, with 2, 5 and 10 one rank cuts its last batch."""
    module, trainer = seeded(Evaluates), trainer_on(mesh)
    (logged,) = trainer.test(module, DataLoader(samples(), batch_size=batch_size), verbose=False)
    assert logged["test"] == pytest.approx(AUROC, abs=1e-6)
    assert logged["test_mean"] == pytest.approx(samples().tensors[1].mean().item(), abs=1e-6)
    seen = of_all_ranks(module.seen)
    assert seen == [list(range(0, 21, 2)), list(range(1, 21, 2))]
    first, second = of_all_ranks(len(module.sizes))
    assert (first, second) == ((11, 10) if batch_size == 1 else (-(-11 // batch_size),) * 2)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [REPLICAS, SHARDS], ids=str)
def test_validation_between_steps(mesh):
    """Also with different numbers of batches, after which training goes on as before."""
    trained = DataLoader(samples(8), batch_size=4)
    states = []
    for validated in (DataLoader(samples(), batch_size=1), None):
        module = seeded(Evaluates)
        trainer = trainer_on(mesh, max_epochs=2, num_sanity_val_steps=2, val_check_interval=1)
        trainer.fit(module, trained, validated)
        if validated is not None:
            assert trainer.callback_metrics["val"].item() == pytest.approx(AUROC, abs=1e-6)
        states.append([full(parameter) for parameter in module.parameters()])
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_pipelines_over_shards(batch_size):
    class Stages(Evaluates):
        def __init__(self):
            super().__init__()
            self.model = torch.nn.Sequential(*self.blocks, self.head)
            self.blocks = self.head = None

        def forward(self, x):
            return self.model(x)

    mesh = {"pipeline_parallel": 2, "data_parallel_shard": 2}
    trainer = trainer_on(mesh, strategy_options={"pipeline_module": "model", "microbatches": 2})
    (logged,) = trainer.test(seeded(Stages), DataLoader(samples(), batch_size=batch_size), verbose=False)
    assert logged["test"] == pytest.approx(AUROC, abs=1e-6)


@pytest.mark.world_size(2)
def test_samplers_of_other_kinds():
    trainer, data = trainer_on(REPLICAS), samples()

    def seen_of(loader):
        module = seeded(Evaluates)
        trainer.test(module, loader, verbose=False)
        return of_all_ranks(module.seen)

    def sorted_of(loader):
        return sorted(itertools.chain(*seen_of(loader)))

    subset = SubsetRandomSampler(range(5, 14), generator=torch.Generator().manual_seed(1))
    assert sorted_of(DataLoader(data, sampler=subset, batch_size=2)) == list(range(5, 14))
    assert sorted_of(DataLoader(data, batch_sampler=Threes(SequentialSampler(data)))) == list(range(21))
    own = DistributedSampler(data, 2, dist.get_rank(), shuffle=False)
    assert sorted_of(DataLoader(data, sampler=own, batch_size=4)) == list(range(21))
    whole = seen_of(DataLoader(data, batch_size=5, drop_last=True))
    assert [len(each) for each in whole] == [10, 10]
    assert len(set(itertools.chain(*whole))) == 20


class Logs(Evaluates):
    """Logs values of each batch, beside those of the epoch."""

    def __init__(self):
        super().__init__()
        self.of_batches = []

    def evaluate(self, batch, name):
        super().evaluate(batch, name)
        self.log("score", batch[1].mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log("count", len(batch[1]), on_step=True, on_epoch=True, sync_dist=True, reduce_fx="sum")

    def on_test_batch_end(self, *args):
        metrics = self.trainer.logged_metrics
        self.of_batches.append((metrics["score_step"].item(), metrics["count_step"].item()))


@pytest.mark.world_size(4)
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 4}, {"data_parallel_shard": 4}], ids=str)
@pytest.mark.parametrize("num_samples", [21, 23])
def test_values_of_batches_that_some_ranks_do_not_have(mesh, num_samples):
    """One or three of four ranks have a sixth batch of one sample: its value is the mean over these ranks."""
    module = seeded(Logs)
    (logged,) = trainer_on(mesh).test(module, DataLoader(samples(num_samples), batch_size=1), verbose=False)
    scores = samples(num_samples).tensors[1]
    assert logged["score_epoch"] == pytest.approx(scores.mean().item(), abs=1e-6)
    assert logged["count_epoch"] == num_samples
    # Batch i of a rank is its i-th sample, and samples are dealt out in turn.
    rows = [scores[4 * index : 4 * index + 4] for index in range(6 if dist.get_rank() < num_samples - 20 else 5)]
    assert [score for score, _ in module.of_batches] == pytest.approx([row.mean().item() for row in rows], abs=1e-6)
    assert [count for _, count in module.of_batches] == [len(row) for row in rows]


@pytest.mark.world_size(2)
def test_what_all_ranks_must_do_in_each_batch_is_refused_where_some_lack_one():
    class Gathers(Evaluates):
        def evaluate(self, batch, name):
            self.all_gather(torch.tensor(1.0))

        def on_validation_epoch_end(self):
            self.gathered = self.all_gather(torch.tensor(1.0))

    trainer = trainer_on(SHARDS)
    with pytest.raises(RuntimeError, match=r"all_gather in a step needs .*\(\[11\], \[10\]; .*batches of two samples"):
        trainer.test(seeded(Gathers), DataLoader(samples(), batch_size=1), verbose=False)
    module = seeded(Gathers)
    trainer_on(SHARDS).validate(module, DataLoader(samples(), batch_size=4), verbose=False)
    assert module.gathered.tolist() == [1.0, 1.0]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [REPLICAS, SHARDS], ids=str)
def test_predictions_are_complete(mesh):
    predictions = trainer_on(mesh).predict(seeded(Evaluates), DataLoader(samples(), batch_size=1))
    first, second = of_all_ranks(torch.cat(predictions).tolist())
    assert [each for pair in itertools.zip_longest(first, second) for each in pair][:-1] == list(range(21))


@pytest.mark.world_size(4)
def test_too_few_samples():
    trainer = trainer_on({"data_parallel_replicate": 4})
    with pytest.raises(ValueError, match="3 samples to evaluate are too few for 4 data-parallel ranks"):
        trainer.test(seeded(Evaluates), DataLoader(samples(3)), verbose=False)


def test_the_last_batch_is_cut():
    batches = SplitLastBatch(range(6), 3)
    assert list(batches) == [[0, 1, 2], [3, 4], [5]]
    assert len(batches) == 3
