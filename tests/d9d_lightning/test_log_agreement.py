"""D9 in Lightning: ranks that log different keys are told which, and neither wait nor add up what does not belong together."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from d9d_lightning.logs.agreement import LogAgreement
from d9d_lightning.metrics import sync_over
from tests.d9d_lightning.support import Regression, build_trainer, make_samples, rank_loader, seeded
from tests.d9d_lightning.test_pipeline_parity import BATCH, Stack

MESH = {"data_parallel_replicate": 2}


def lone(module):
    module.log("extra", 1.0, sync_dist=True, on_step=True)


def lone_at_the_end(module):
    module.log("loss", 1.0, sync_dist=True, on_step=True)
    module.log("extra", 1.0, sync_dist=True, on_step=False, on_epoch=True)


def lone_metric(module):
    module.mean(1.0)
    module.log("extra", module.mean, on_step=False, on_epoch=True)


def nothing(module):
    pass


def one_loss(module):
    module.log("loss", 1.0, sync_dist=True, on_step=True)


def other_operation(module):
    module.log("extra", 1.0, sync_dist=True, on_step=True, reduce_fx="max")


def loss_first(module):
    module.log_dict({"loss": 1.0, "extra": 2.0}, sync_dist=True)


def extra_first(module):
    module.log_dict({"extra": 2.0, "loss": 1.0}, sync_dist=True)


class Logs(Regression):
    """Rank 0 logs one way, rank 1 another one: in training, or in evaluation."""

    def __init__(self, ways, where="training_step"):
        super().__init__()
        self.mean = MeanMetric()
        self.own_mean = MeanMetric(sync_on_compute=False)
        self.lone_mean = MeanMetric()
        sync_over(self.lone_mean, None)
        self.way = nothing if ways is None else ways[dist.get_rank()]
        self.where = where

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.where == "training_step":
            self.way(self)
        else:
            self.log("of a batch", 1.0, sync_dist=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args):
        if self.where == "on_train_batch_end":
            self.way(self)

    def on_train_epoch_end(self):
        if self.where == "on_train_epoch_end":
            self.way(self)

    def validation_step(self, batch, batch_idx):
        self.log("of a batch", 1.0, sync_dist=True)
        if self.where == "validation_step":
            self.way(self)

    def on_validation_epoch_end(self):
        self.log("of all", 1.0, sync_dist=True)
        if self.where == "on_validation_epoch_end":
            self.way(self)


class TakesTheLoader(Logs):
    """Reads its batches by itself."""

    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True, batch_size=2)
        return loss


def fit(module, mesh=MESH, **options):
    trainer = build_trainer(mesh, **options)
    loader = rank_loader(make_samples(16), 4, dist.get_rank(), 2)
    trainer.fit(module, loader, loader)
    return trainer


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("ways", "named"),
    [
        ((lone, nothing), 'extra: "mean, on_step=True, on_epoch=False" on rank 0; nothing on rank 1'),
        ((one_loss, lone_at_the_end), 'extra: nothing on rank 0; "mean, on_step=False, on_epoch=True" on rank 1'),
        ((lone_metric, nothing), 'extra: "the metric mean" on rank 0; nothing on rank 1'),
        ((lone, one_loss), "loss: nothing on rank 0"),
        ((lone, other_operation), 'extra: "mean, on_step=True, on_epoch=False" on rank 0; "max, '),
        ((loss_first, extra_first), '["training_step.extra"] on rank 1'),
    ],
    ids=lambda value: "-".join(way.__name__ for way in value) if isinstance(value, tuple) else "",
)
@pytest.mark.parametrize("mesh", [MESH, {"data_parallel_shard": 2}], ids=str)
def test_keys_of_a_training_step(mesh, ways, named):
    with pytest.raises(ValueError, match="do not agree on what they log") as error:
        fit(seeded(lambda: Logs(ways)), mesh)
    assert named in str(error.value)


def lone_of_an_epoch(module):
    module.log("extra", 1.0, sync_dist=True, on_epoch=True)


def lone_metric_of_an_epoch(module):
    module.log("extra", module.mean, on_epoch=True)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("way", [lone_of_an_epoch, lone_metric_of_an_epoch])
@pytest.mark.parametrize("where", ["validation_step", "on_validation_epoch_end", "on_train_epoch_end"])
def test_keys_of_an_epoch(where, way):
    named = rf"{where}\.extra: \"(mean, on_step=False, on_epoch=True|the metric mean)\" on rank 0; nothing on rank 1"
    with pytest.raises(ValueError, match=named):
        fit(seeded(lambda: Logs((way, nothing), where)))


@pytest.mark.world_size(2)
def test_keys_of_the_end_of_a_batch():
    named = r'on_train_batch_end\.extra: "mean, on_step=True, on_epoch=False" on rank 0; nothing on rank 1'
    with pytest.raises(ValueError, match=named):
        fit(seeded(lambda: Logs((lone, nothing), "on_train_batch_end")))


class EarlyEnd(L.Callback):
    """Logs before the progress bar reads, and reads on rank 0 alone as that does."""

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("early", float(dist.get_rank()), sync_dist=True)
        if dist.get_rank() == 0:
            assert trainer.callback_metrics["early"] == 0.5


@pytest.mark.world_size(2)
@pytest.mark.parametrize("ways", [(lone_of_an_epoch, lone_of_an_epoch), (lone_of_an_epoch, nothing)])
def test_what_rank_0_reads_alone_when_an_epoch_ends(ways):
    module = seeded(lambda: Logs(ways, "on_train_epoch_end"))
    if nothing not in ways:
        assert fit(module, callbacks=[EarlyEnd()]).callback_metrics["extra"] == 1.0
        return
    with pytest.raises(ValueError, match=r"on_train_epoch_end\.extra: .*on rank 0; nothing on rank 1"):
        fit(module, callbacks=[EarlyEnd()])


@pytest.mark.world_size(2)
def test_keys_of_microbatches():
    with pytest.raises(ValueError, match=r"extra: .* on rank 0; nothing on rank 1"):
        fit(seeded(lambda: Logs((lone, nothing))), strategy_options={"microbatches": 2})


class ByHand(Logs):
    """Logs before its backward pass, and behind it."""

    def __init__(self, ways, ways_behind):
        super().__init__(ways)
        self.behind = ways_behind[dist.get_rank()]
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()
        self.behind(self)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("ways", [[(nothing, lone), (nothing, nothing)], [(nothing, nothing), (nothing, lone)]])
def test_keys_of_steps_by_hand(ways):
    with pytest.raises(ValueError, match=r"extra: nothing on rank 0; .* on rank 1"):
        fit(seeded(lambda: ByHand(*ways)))


class LogsBehindThePipeline(Stack):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.trainer.strategy.distributed_sampler_kwargs["rank"] == 0:
            self.log("extra", loss, sync_dist=True)
        return loss


@pytest.mark.world_size(4, timeout_s=300)
def test_keys_of_a_pipeline():
    mesh = {"pipeline_parallel": 2, "data_parallel_replicate": 2}
    trainer = build_trainer(mesh, strategy_options={"pipeline_module": "model", "microbatches": 2})
    loader = rank_loader(make_samples(2 * BATCH), BATCH, trainer.strategy.distributed_sampler_kwargs["rank"], 2)
    with pytest.raises(ValueError, match=r"extra: .* on rank 0; nothing on rank 1"):
        trainer.fit(seeded(LogsBehindThePipeline), loader)


def for_itself(module):
    rank = float(dist.get_rank())
    module.log("mine", rank)
    module.log("first", rank, sync_dist=True, rank_zero_only=True)
    module.log("ours", rank, sync_dist=True)


def with_the_others(module):
    module.log("ours", float(dist.get_rank()), sync_dist=True)


def noting_comparisons(monkeypatch):
    """Return a list that takes where this rank compares what it logs, in order."""
    places = []
    compare = LogAgreement._compare

    def note(self, results, where, **options):
        places.append(where)
        compare(self, results, where, **options)

    monkeypatch.setattr(LogAgreement, "_compare", note)
    return places


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("kind", "arguments", "first_step"),
    [
        (
            ByHand,
            [(nothing, nothing), (one_loss, one_loss)],
            ["before a backward pass", "in the middle of a value that is reduced"],
        ),
        (TakesTheLoader, [None], ["in the middle of a value that is reduced"]),
    ],
)
def test_steps_that_microbatches_do_not_cut_are_compared_once(monkeypatch, kind, arguments, first_step):
    compared = noting_comparisons(monkeypatch)
    fit(seeded(lambda: kind(*arguments)), strategy_options={"microbatches": 2}, limit_val_batches=0)
    assert compared == [*first_step, "at the end of the step", "at the end of the batch", "at the end of the epoch"]


@pytest.mark.world_size(2)
def test_what_is_not_reduced_may_differ_and_only_the_first_batch_is_compared(monkeypatch):
    compared = noting_comparisons(monkeypatch)
    module = seeded(lambda: Logs((for_itself, with_the_others)))
    trainer = fit(module, max_epochs=2)
    assert trainer.callback_metrics["ours"] == 0.5
    assert len(module.losses) == 8
    value = "in the middle of a value that is reduced"
    batch = ["at the end of the step", "at the end of the batch"]
    # In validation the values of batches and of the hook are reduced when its epoch ends; then that of training does.
    assert compared == [value, *batch, *batch, value, value, "at the end of the epoch", "at the end of the epoch"]
    assert torch.isfinite(torch.stack(module.losses)).all()


def metric_of_the_step(module):
    module.mean(1.0)
    module.log("mine", module.mean, on_step=True, on_epoch=False)


def metric_that_does_not_gather(module):
    module.own_mean(1.0)
    module.log("mine", module.own_mean, on_step=False, on_epoch=True)


def metric_over_no_ranks(module):
    module.lone_mean(1.0)
    module.log("mine", module.lone_mean, on_step=False, on_epoch=True)


class OverItsOwnGroup(Logs):
    """Rank 0 reduces over a group that it alone is in."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if dist.get_rank() == 0:
            self.log("mine", 3.0, sync_dist=True, sync_dist_group=self.own_group)
        return loss


@pytest.mark.world_size(2)
@pytest.mark.parametrize("way", [metric_of_the_step, metric_that_does_not_gather, metric_over_no_ranks])
def test_metrics_that_are_not_gathered_may_differ(way):
    trainer = fit(seeded(lambda: Logs((way, nothing))), limit_val_batches=0)
    assert dict(trainer.callback_metrics) == ({"mine": 1.0} if dist.get_rank() == 0 else {})


@pytest.mark.world_size(2)
def test_keys_that_are_reduced_over_another_group_may_differ():
    groups = [dist.new_group([rank]) for rank in range(2)]
    module = seeded(lambda: OverItsOwnGroup(None))
    module.own_group = groups[dist.get_rank()]
    trainer = fit(module, limit_val_batches=0)
    assert dict(trainer.callback_metrics) == ({"mine": 3.0} if dist.get_rank() == 0 else {})


class Stream(IterableDataset):
    """Gives as many samples as it is told to, and does not tell."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __iter__(self):
        x, y = make_samples(max(1, self.num_samples))
        yield from list(zip(x, y, strict=True))[: self.num_samples]


class CountsBatches(Logs):
    def validation_step(self, batch, batch_idx):
        self.mean.update(float(batch_idx))

    def on_validation_epoch_end(self):
        self.log("mean", self.mean.compute(), sync_dist=True)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("limits", [{}, {"limit_val_batches": 3}], ids=str)
def test_a_rank_may_find_that_it_has_nothing_to_evaluate(limits):
    trainer = build_trainer(MESH, **limits)
    loader = DataLoader(Stream(0 if dist.get_rank() else 8), batch_size=2)
    [values] = trainer.validate(seeded(lambda: CountsBatches(None)), loader)
    # Batches 0 to 3, or to 2.
    assert values["mean"] == (1.0 if limits else 1.5)
