"""torchmetrics and self.log count every sample once."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MetricCollection, SumMetric
from torchmetrics.aggregation import CatMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassAUROC

from d9d.core.dist_context import DeviceMeshParameters
from d9d_lightning.jobs.launch import join_job
from d9d_lightning.metrics import sync as metric_sync
from d9d_lightning.metrics.install import install_metric_sync
from tests.d9d_lightning.support import (
    MESHES,
    NUM_FEATURES,
    PoolEnvironment,
    Regression,
    build_trainer,
    make_samples,
    rank_loader,
    seeded,
)

NUM_CLASSES = 3


def metric_of(metric, **options):
    holder = nn.ModuleList([metric])
    # The strategy does both when it starts.
    context = join_job(DeviceMeshParameters(**options), PoolEnvironment(), 2, torch.device("cpu"))
    install_metric_sync(holder)
    metric.context = context  # keeps it alive, as the strategy does
    return metric


@pytest.mark.world_size(2)
def test_sums_are_not_doubled():
    metric = metric_of(SumMetric(), data_parallel_shard=2)
    metric.update(float(dist.get_rank() + 1))
    assert metric.compute() == 3


@pytest.mark.world_size(2)
def test_auroc_of_uneven_ranks_is_that_of_all_samples():
    """A43: the value over 21 samples of which the ranks hold 11 and 10."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(21, generator=generator)
    labels = (torch.rand(21, generator=generator) < scores).int()
    metric = metric_of(BinaryAUROC(), data_parallel_replicate=2)
    metric.update(scores[dist.get_rank() :: 2], labels[dist.get_rank() :: 2])
    assert metric.compute().item() == pytest.approx(0.772727, abs=1e-6)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("idle_rank", [0, 1])
@pytest.mark.parametrize("num_updates", [1, 2])
def test_a_rank_without_data_adds_nothing(idle_rank, num_updates):
    """Scores are a matrix and labels are integers, of which an idle rank knows nothing."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand((20, NUM_CLASSES), generator=generator).softmax(-1)
    labels = torch.randint(NUM_CLASSES, (20,), generator=generator)
    metric = metric_of(MulticlassAUROC(NUM_CLASSES, thresholds=None), data_parallel_shard=2)
    if dist.get_rank() != idle_rank:
        for part in range(num_updates):
            metric.update(scores[part::num_updates], labels[part::num_updates])
    alone = MulticlassAUROC(NUM_CLASSES, thresholds=None, sync_on_compute=False)
    alone.update(scores, labels)
    torch.testing.assert_close(metric.compute(), alone.compute())


@pytest.mark.world_size(2)
def test_no_rank_with_data():
    metric = metric_of(CatMetric(), data_parallel_shard=2)
    assert len(metric.compute()) == 0


class Classifier(Regression):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.count = SumMetric()
        self.late = None

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        x, y = batch
        if self.late is None:
            self.late = SumMetric()
        self.late.update(1)
        self.accuracy(self(x), y)
        self.count.update(len(y))
        self.log("accuracy", self.accuracy)
        self.log("count", self.count)
        self.log("mean_label", y.double().mean(), batch_size=len(y), on_epoch=True, sync_dist=True)
        self.log("num_samples", float(len(y)), reduce_fx="sum", sync_dist=True)
        self.log("largest", float(y.max()), reduce_fx="max", sync_dist=True)

    def on_validation_epoch_end(self):
        self.late_sync = metric_sync.StateSync.of(self.late)
        self.num_batches = self.late.compute().item()


def class_samples(num_samples):
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(num_samples, NUM_FEATURES, generator=generator, dtype=torch.float64),
        torch.randint(NUM_CLASSES, (num_samples,), generator=generator),
    )


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_validation_counts_each_sample_once(mesh):
    x, y = class_samples(17)
    rank = dist.get_rank()
    # Batches of 5 and 5 samples, and of 4 and 3.
    mine, batch_size = (slice(0, 10), 5) if rank == 0 else (slice(10, 17), 4)
    module = seeded(Classifier)
    loader = DataLoader(TensorDataset(x[mine], y[mine]), batch_size=batch_size)
    [result] = build_trainer(mesh).validate(module, loader)
    with torch.no_grad():
        expected = (seeded(Classifier)(x).argmax(-1) == y).double().mean()
    assert result["accuracy"] == pytest.approx(expected.item(), abs=1e-6)
    assert result["count"] == result["num_samples"] == 17
    assert result["mean_label"] == pytest.approx(y.double().mean().item(), abs=1e-6)
    assert result["largest"] == y.max().item()
    assert module.num_batches == 4
    assert module.late_sync.name == "late"


class UnevenLog(Regression):
    def validation_step(self, batch, batch_idx):
        value = torch.tensor(float(dist.get_rank() + 1))
        self.log("value", value, batch_size=3 + dist.get_rank(), on_epoch=True, sync_dist=True)


@pytest.mark.world_size(2)
def test_means_weigh_ranks_by_their_samples():
    """(3 * 1 + 4 * 2) / 7, not 1.8333 by a truncated mean of 3 and 4."""
    loader = DataLoader(TensorDataset(torch.zeros(1, 1)))
    [result] = build_trainer({"data_parallel_replicate": 2}).validate(seeded(UnevenLog), loader)
    assert result["value"] == pytest.approx(11 / 7, abs=1e-6)


class ManyMetrics(Regression):
    """Logs metrics in steps, and further ones when an epoch ends."""

    def __init__(self):
        super().__init__()
        self.scores = MetricCollection({"sum": SumMetric(), "largest": MaxMetric()}, prefix="scores/")
        self.count = SumMetric()
        self.num_epochs = SumMetric()
        self.at_end = None

    def training_step(self, batch, batch_idx):
        values = batch[0].sum(-1)
        self.scores.update(values)
        self.count.update(len(values))
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        self.log("count", self.count, on_step=False, on_epoch=True, prog_bar=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.num_epochs.update(1)
        self.log("num_epochs", self.num_epochs)
        self.at_end = self.count.compute().item()


@pytest.mark.world_size(2)
def test_metrics_logged_in_steps_are_gathered_at_once(monkeypatch):
    """The progress bar of rank 0 reads them before `on_train_epoch_end` of the module logs another."""
    gathered = []

    def counted(syncs, route, device):
        gathered.append(sorted(sync.name for sync in syncs))
        return gather(syncs, route, device)

    gather = metric_sync._gather
    monkeypatch.setattr(metric_sync, "_gather", counted)
    x, y = make_samples(8)
    loader = rank_loader((x, y), 4, dist.get_rank(), 2)
    module = seeded(ManyMetrics)
    trainer = build_trainer({"data_parallel_replicate": 2}, enable_progress_bar=True, max_epochs=2)
    trainer.fit(module, loader)
    values = {name: value.item() for name, value in trainer.callback_metrics.items()}
    expected = {"scores/sum": x.sum().item(), "scores/largest": x.sum(-1).max().item(), "count": 8, "num_epochs": 2}
    assert values == pytest.approx(expected)
    assert module.at_end == 8
    together = ["count", "scores.largest", "scores.sum"]
    assert gathered == [together, ["count"], ["num_epochs"]] * 2
