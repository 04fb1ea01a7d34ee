"""What the last stage logs is known on all ranks of the pipeline, by one broadcast per step."""

import warnings

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.aggregation import CatMetric

from d9d_lightning.logs.exchange import LogExchange
from d9d_lightning.logs.replay import LogEntry, LogOptions, LogRecorder, replay
from tests.d9d_lightning.support import Regression, plain_trainer

SOURCE = 1
CPU = torch.device("cpu")


class Measured(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.mean = MeanMetric()
        self.all = MetricCollection({"sum": SumMetric(), "cat": CatMetric()})


def entry(name, value, batch_size=None, *, shows_step=True, **options):
    options = LogOptions(**options)
    return LogEntry(name=name, value=value, batch_size=batch_size, shows_step=shows_step, options=options)


def is_source():
    return dist.get_rank() == SOURCE


def exchange_of(module=None, *, is_on_host=True):
    exchange = LogExchange(module or L.LightningModule(), dist.group.WORLD, SOURCE, CPU)
    # Tensors by a broadcast of their own, as on an accelerator.
    exchange._is_on_host = is_on_host
    return exchange


def shared(exchange, entries, values=()):
    """Share what only the source has."""
    take = None if entries is None else lambda: entries
    return exchange.share(take, list(values)) if is_source() else exchange.share(None, None)


class BroadcastCount:
    def __init__(self, monkeypatch):
        self.num = 0
        broadcast = dist.broadcast

        def counted(*args, **kwargs):
            self.num += 1
            return broadcast(*args, **kwargs)

        monkeypatch.setattr(dist, "broadcast", counted)

    def take(self):
        num, self.num = self.num, 0
        return num


@pytest.mark.world_size(2)
@pytest.mark.parametrize("is_on_host", [True, False])
def test_entries_arrive_as_they_are(is_on_host):
    entries = [
        entry("number", 0.1, 3, prog_bar=True, on_epoch=False),
        entry("flag", True),
        entry("large", 2**53 - 1),
        entry("tokens", torch.tensor(0.1), torch.tensor(2**53 - 1), reduce_fx="sum", sync_dist=True),
        entry("double", torch.tensor(0.1, dtype=torch.float64), 2.5, logger=False, rank_zero_only=True),
        entry("half", torch.tensor(0.1, dtype=torch.bfloat16, requires_grad=True)),
        entry("nan", torch.tensor(float("nan")), shows_step=False),
        entry("bool", torch.tensor(True), add_dataloader_idx=False),
    ]
    values = [torch.tensor(1 / 3, dtype=torch.float64), torch.tensor([[1], [2**40]])]
    exchange = exchange_of(is_on_host=is_on_host)
    for _ in range(2):
        received, received_values = shared(exchange, entries, values)
        assert [(e.name, e.options, e.shows_step, type(e.batch_size)) for e in received] == [
            (e.name, e.options, e.shows_step, type(e.batch_size)) for e in entries
        ]
        for left, right in zip(received, entries, strict=True):
            # A flag comes back as 1.
            sent = int(right.value) if isinstance(right.value, bool) else right.value
            left_value, right_value = torch.as_tensor(left.value), torch.as_tensor(sent).detach()
            torch.testing.assert_close(left_value, right_value, rtol=0, atol=0, equal_nan=True)
            assert not left_value.requires_grad
            assert left.batch_size == right.batch_size
        torch.testing.assert_close(received_values, values, rtol=0, atol=0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("is_on_host", [True, False])
def test_a_known_step_takes_one_broadcast(monkeypatch, is_on_host):
    exchange = exchange_of(is_on_host=is_on_host)
    broadcasts = BroadcastCount(monkeypatch)
    often = [entry("loss", torch.tensor(0.5), 4)]
    rare = [*often, *(entry(f"norm/{index}", float(index)) for index in range(200))]
    counts = []
    for step in range(12):
        sent = rare if step % 3 == 2 else often
        received, [loss] = shared(exchange, sent, [torch.tensor(float(step))])
        assert [(e.name, float(e.value)) for e in received] == [(e.name, float(e.value)) for e in sent]
        assert loss == step
        counts.append(broadcasts.take())
    # A header, the schema and the values, for each of two schemas.
    assert counts == [num + (not is_on_host) for num in (3, 1, 3, *[1] * 9)]
    assert shared(exchange, []) == ([], [])
    assert shared(exchange, []) == ([], [])
    assert broadcasts.take() == 3 + 1


@pytest.mark.world_size(2)
def test_metrics_know_the_step_and_the_updates_of_the_source():
    module = Measured()
    exchange = exchange_of(module)
    for step in range(1, 3):
        if is_source():
            module.mean(torch.tensor([1.0, 2.0 * step]))
            module.all(torch.arange(step + 1.0))
        else:
            module.mean._computed = torch.zeros(())
        received, _ = shared(
            exchange,
            [
                entry("mean", module.mean, metric_attribute="mean"),
                entry("cat", module.all["cat"], metric_attribute="all.cat"),
                entry("sum", module.all["sum"], 7, metric_attribute="all.sum", shows_step=False),
            ],
        )
        assert [e.value for e in received] == [module.mean, module.all["cat"], module.all["sum"]]
        assert received[2].batch_size == 7
        assert module.mean._forward_cache == (1 + 2 * step) / 2
        assert module.all["cat"]._forward_cache.tolist() == list(range(step + 1))
        assert [metric._update_count for metric in (module.mean, *module.all.values())] == [step] * 3
        assert module.mean._computed is None
        assert (module.all["sum"]._forward_cache is None) is not is_source()


@pytest.mark.world_size(2)
def test_ranks_agree_on_what_is_computed():
    """A rank computes when the source does: it is then that they gather."""
    module = Measured()
    exchange = exchange_of(module)
    if is_source():
        module.mean.update(1.0)
    module.mean._computed = torch.ones(())
    for _ in range(2):
        shared(exchange, [entry("mean", module.mean, metric_attribute="mean")])
        assert module.mean._computed == 1


class DictMetric(MeanMetric):
    def compute(self):
        return {"mean": super().compute()}


def failures(module):
    dict_metric = DictMetric()
    module.dict_metric = dict_metric
    if is_source():
        dict_metric(1.0)
    return [
        (
            [entry("key", 1.0, sync_dist_group=dist.group.WORLD)],
            NotImplementedError,
            "'key', .*, sync_dist_group.*Leave",
        ),
        ([entry(("a", "b"), 1.0)], TypeError, "name must be a string"),
        ([entry("key", 1.0, logger=object())], TypeError, "argument of self.log is a object"),
        ([entry("key", 10**400)], RuntimeError, "OverflowError"),
        (
            [entry("key", module.all["cat"], metric_attribute="mean")],
            ValueError,
            "metric_attribute='mean'.*Leave it out",
        ),
        ([entry("key", dict_metric, metric_attribute="dict_metric")], ValueError, "DictMetric is a dict"),
        (None, ValueError, "must pass its log entries"),
    ]


@pytest.mark.world_size(2)
def test_failures_of_the_source_are_those_of_all():
    module = Measured()
    exchange = exchange_of(module)
    for entries, error, message in failures(module):
        with pytest.raises(error, match=message):
            shared(exchange, entries)
        assert shared(exchange, [entry("fine", 2.0)])[0][0].value == 2


@pytest.mark.world_size(2)
def test_metrics_must_be_on_all_ranks():
    module = Measured()
    exchange = exchange_of(module)
    if is_source():
        module.late = MeanMetric()
    for _ in range(2):
        entries = [entry("late", module.late, metric_attribute="late")] if is_source() else None
        with pytest.raises(ValueError, match=r"rank 0 of the pipeline lacks late\. Create"):
            shared(exchange, entries)
    assert shared(exchange, [entry("fine", 2.0)])[0][0].value == 2


class Staged(Regression):
    """Its step has two microbatches of 1 and 2 samples, which the last rank alone runs."""

    def __init__(self):
        super().__init__(width=2)
        self.automatic_optimization = False
        self.metric = MeanMetric(sync_on_compute=False)
        self.recorder = LogRecorder(self)
        self.exchange = exchange_of(self)

    def train_dataloader(self):
        return DataLoader(torch.zeros(3, 2))

    def training_step(self, batch, batch_idx):
        if is_source():
            for index in range(2):
                with self.recorder.recording(torch.zeros(index + 1)):
                    self.log("loss", torch.tensor(float(batch_idx + index)), on_epoch=True, prog_bar=True)
                    self.log("metric", self.metric(float(index)), on_step=True)
                    self.metric(float(index))
                    self.log("object", self.metric, on_step=True)
                    if batch_idx == 1:
                        self.log("some", 1.0, on_epoch=True)
        entries, _ = shared(self.exchange, self.recorder.take())
        replay(self, entries)


@pytest.mark.world_size(2)
def test_all_ranks_log_the_same():
    module = Staged()
    trainer = plain_trainer()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*called before the ``update``.*")
        trainer.fit(module)
    found = {name: value.item() for name, value in trainer.callback_metrics.items()}
    # Step s logs s of one sample and s + 1 of two.
    steps = [step + 2 / 3 for step in range(3)]
    expected = {
        "loss_step": steps[2],
        "loss_epoch": sum(steps) / 3,
        "loss": sum(steps) / 3,
        "metric": 2 / 3,
        # The mean of 0 and 1, which both microbatches give it.
        "object": 0.5,
        "some_step": 1.0,
        "some_epoch": 1.0,
        "some": 1.0,
    }
    assert found == pytest.approx(expected)
    assert trainer.progress_bar_metrics["loss_step"] == pytest.approx(steps[2])
