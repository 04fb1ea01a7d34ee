"""Log calls of microbatches become one call per key, with the value over all samples."""

import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from d9d_lightning.logs.replay import LogRecorder, replay
from d9d_lightning.metrics.step_calls import follow_metrics
from tests.d9d_lightning.support import Regression, plain_trainer


class Packed(Regression):
    """Runs `log_microbatch` for each row count of a batch, as a pack of microbatches, and logs what was recorded."""

    def __init__(self, log_microbatch, packs=((1, 2),)):
        super().__init__(width=2)
        self.mean_metric = MeanMetric()
        self.collection = MetricCollection({"sum": SumMetric(), "mean": MeanMetric()}, prefix="all/")
        self.automatic_optimization = False
        follow_metrics(self)
        self.packs = packs
        self.log_microbatch = log_microbatch
        self.entries = []
        self.by_step = []

    def train_dataloader(self):
        # One batch is the list of its microbatches.
        return DataLoader([[torch.zeros(size, 2) for size in pack] for pack in self.packs], batch_size=None)

    def training_step(self, batch, batch_idx):
        recorder = LogRecorder(self) if batch_idx == 0 else self.recorder
        self.recorder = recorder
        for index, microbatch in enumerate(batch):
            with recorder.recording(microbatch):
                self.log_microbatch(self, microbatch, index)
            assert "log" not in vars(self)
        self.entries = recorder.take()
        assert recorder.take() == []
        replay(self, self.entries)

    def on_train_batch_end(self, *args):
        # The connector is about to collect the values of the step.
        self.by_step.append({name: value.clone() for name, value in self.trainer.callback_metrics.items()})


def run(log_microbatch, packs=((1, 2),), **options):
    module = Packed(log_microbatch, packs)
    trainer = plain_trainer(**options)
    trainer.fit(module)
    return module, trainer.callback_metrics


def logs(values, **options):
    """Log one value per microbatch, in turn over all packs; None logs nothing."""
    values = iter(values)

    def log_microbatch(module, microbatch, index):
        if (value := next(values)) is not None:
            module.log("key", value, **options)

    return log_microbatch


BOTH = {"on_step": True, "on_epoch": True}


def test_means_weigh_by_samples():
    # Microbatches of 3 and 4 samples, and then of 1 and 2.
    module, metrics = run(logs([1.0, 2.0, 3.0, 5.0], **BOTH), packs=((3, 4), (1, 2)))
    steps = [step["key_step"].item() for step in module.by_step]
    assert steps == pytest.approx([11 / 7, 13 / 3])
    assert metrics["key_epoch"].item() == pytest.approx((11 + 13) / 10)


def test_means_of_integers_are_not_truncated():
    module, metrics = run(logs([torch.tensor(1), torch.tensor(2)], **BOTH), packs=((3, 4),))
    assert metrics["key_epoch"].item() == module.by_step[0]["key_step"].item() == pytest.approx(11 / 7)
    assert metrics["key_epoch"].dtype == torch.float32


@pytest.mark.parametrize(
    "as_value",
    [float, torch.tensor, np.float64, lambda v: torch.tensor([v])],
    ids=["float", "tensor", "numpy", "vector"],
)
@pytest.mark.parametrize(("reduction", "expected"), [("sum", 6.0), ("max", 4.0), ("min", -1.0), (max, 4.0)])
def test_other_reductions(reduction, expected, as_value):
    module, metrics = run(logs(map(as_value, [3.0, -1.0, 4.0]), reduce_fx=reduction, **BOTH), packs=((1, 2, 3),))
    assert metrics["key_epoch"] == module.by_step[0]["key_step"] == expected
    assert metrics["key_epoch"].ndim == 0


@pytest.mark.parametrize("as_value", [bool, torch.tensor], ids=["bool", "tensor"])
def test_sums_of_flags_count_them(as_value):
    _, metrics = run(logs(map(as_value, [True, True, False]), reduce_fx="sum", on_epoch=True), packs=((1, 1, 1),))
    assert metrics["key"] == 2


def test_one_microbatch_logs_what_lightning_would():
    value = torch.tensor(1 / 3)
    module, metrics = run(logs([value], **BOTH), packs=((7,),))
    assert metrics["key_epoch"] == value
    [entry] = module.entries
    assert (entry.value, entry.batch_size, entry.name) == (value, 7, "key")


def test_values_are_taken_when_they_are_logged():
    value = torch.zeros((), requires_grad=True)

    def log_total(module, microbatch, index):
        with torch.no_grad():
            value.add_(1.0)
        module.log("key", value, reduce_fx="sum")

    module, _ = run(log_total, packs=((1, 1), (1,)))
    assert [step["key"].item() for step in module.by_step] == [1 + 2, 3]
    assert not module.entries[0].value.requires_grad


def test_given_sizes_come_first():
    def log_tokens(module, microbatch, index):
        module.log("number", float(index), batch_size=3 * index + 1, **BOTH)
        module.log("tensor", torch.tensor(float(index)), batch_size=torch.tensor(3 * index + 1), **BOTH)
        module.log("shown", float(index))

    module, metrics = run(log_tokens, packs=((5, 5),))
    assert metrics["number_epoch"] == metrics["tensor_epoch"] == pytest.approx(4 / 5)
    assert [entry.batch_size for entry in module.entries] == [5, 5, None]
    assert metrics["shown"] == 0.5


@pytest.mark.parametrize("as_size", [int, torch.tensor], ids=["int", "tensor"])
def test_a_pack_without_samples_leaves_the_epoch_alone(as_size):
    sizes = iter([0, 0, 1, 3])

    def log_microbatch(module, microbatch, index):
        size = next(sizes)
        module.log("key", 2.0 + size, batch_size=as_size(size), **BOTH)

    module, metrics = run(log_microbatch, packs=((1, 1), (1, 1)))
    assert module.by_step[0]["key_step"] == 2.0
    assert metrics["key_epoch"] == pytest.approx((3 + 3 * 5) / 4)


def test_keys_of_some_microbatches_and_of_two_calls():
    def log_microbatch(module, microbatch, index):
        if index == 1:
            module.log("some", 4.0, **BOTH)
        module.log("twice", float(index), **BOTH)
        module.log("twice", 10.0, **BOTH)

    module, metrics = run(log_microbatch, packs=((1, 3),))
    assert metrics["some_epoch"] == 4.0
    assert module.entries[1].batch_size == 3
    # 0 and 10 of one sample, 1 and 10 of three.
    assert metrics["twice_epoch"] == module.by_step[0]["twice_step"] == pytest.approx((0 + 10 + 3 + 30) / 8)
    assert [entry.name for entry in module.entries] == ["twice", "some"]


def test_batches_without_size():
    """Lightning asks for a size where the epoch's mean needs one only."""

    def log_microbatch(module, microbatch, index):
        with module.recorder.recording(object()):
            module.log("shown", float(index))
            with pytest.raises(MisconfigurationException, match="could not infer the batch_size"):
                module.log("mean", 1.0, on_epoch=True)

    module = Packed(log_microbatch)
    plain_trainer().fit(module)
    assert module.trainer.callback_metrics["shown"] == 0.5


def test_an_ambiguous_size_is_told_once():
    def log_microbatch(module, microbatch, index):
        with module.recorder.recording([torch.zeros(9, 1), torch.zeros(11, 2)]):
            module.log("shown", 1.0)
            module.log("mean", 1.0, on_epoch=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, _ = run(log_microbatch)
    assert module.entries[1].batch_size == 18
    assert sum("ambiguous collection. The batch size we found is 9" in str(w.message) for w in caught) == 1


def test_metrics_keep_their_own_sums():
    def log_microbatch(module, microbatch, index):
        module.mean_metric(float(index + 1), weight=len(microbatch))
        module.collection(torch.tensor(float(index)))
        module.log("mean", module.mean_metric, **BOTH)
        module.log_dict(module.collection, **BOTH)

    module, metrics = run(log_microbatch, packs=((3, 4), (1,)))
    # 3 samples of 1 and 4 of 2 in the first step; 1 of 1 in the second.
    assert [step["mean_step"].item() for step in module.by_step] == pytest.approx([11 / 7, 1])
    assert metrics["mean_epoch"].item() == pytest.approx((3 * 1 + 4 * 2 + 1 * 1) / 8)
    assert (metrics["all/sum_epoch"], metrics["all/mean_epoch"].item()) == (1, pytest.approx(1 / 3))
    assert [entry.options.metric_attribute for entry in module.entries] == [
        "mean_metric",
        "collection.mean",
        "collection.sum",
    ]


def test_dropped_calls_vanish():
    def log_microbatch(module, microbatch, index):
        with module.recorder.dropping():
            module.log("dropped", torch.zeros(3))
        module.log("kept", 1.0)

    _, metrics = run(log_microbatch)
    assert "dropped" not in metrics
    assert metrics["kept"] == 1


MISTAKES = {
    "nested": (lambda m: m.log("key", {"a": {"b": 1.0}}), ValueError, "nested dictionaries"),
    "type": (lambda m: m.log("key", "text"), ValueError, "`str` values cannot be logged"),
    "size": (lambda m: m.log("key", torch.zeros(2)), ValueError, "must have a single element"),
    "complex": (lambda m: m.log("key", 1j), Exception, "without overflow|complex"),
    "index": (lambda m: m.log("a/dataloader_idx_0", 1.0), MisconfigurationException, "dataloader_idx"),
    "nothing": (lambda m: m.log("key", 1.0, on_step=False), MisconfigurationException, "not useful"),
    "reduction": (lambda m: m.log("key", 1.0, reduce_fx="median"), MisconfigurationException, "median"),
    "function": (lambda m: m.log("key", 1.0, reduce_fx=[]), MisconfigurationException, "min,max,mean,sum"),
    "metric": (lambda m: m.log("key", SumMetric()), MisconfigurationException, "Could not find"),
    "collection": (lambda m: m.log("key", m.collection), ValueError, "`MetricCollection` values"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told_at_the_call(mistake):
    call, error, message = MISTAKES[mistake]
    seen = []

    def log_microbatch(module, microbatch, index):
        module.log("before", 1.0)
        with pytest.raises(error, match=message):
            call(module)
        seen.append(index)

    module, _ = run(log_microbatch)
    assert seen == [0, 1]
    assert [entry.name for entry in module.entries] == ["before"]


def test_different_arguments_are_refused_by_lightning():
    def log_microbatch(module, microbatch, index):
        module.log("key", 1.0, reduce_fx=("sum", "max")[index])

    with pytest.raises(MisconfigurationException, match="twice in `training_step` with different arguments"):
        run(log_microbatch)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_pack_logs_nothing(error):
    def log_microbatch(module, microbatch, index):
        def fail():
            module.log("key", 1.0)
            raise error

        with pytest.raises(error), module.recorder.recording(microbatch):
            fail()

    module, _ = run(log_microbatch)
    assert module.entries == []
    # Of the recording around that one.
    assert "log" not in vars(module)


def test_lightning_answers_where_nothing_can_be_logged():
    module = Packed(logs([]))
    recorder = LogRecorder(module)
    with recorder.recording(torch.zeros(1)), pytest.warns(UserWarning, match="trainer` reference is not registered"):
        module.log("key", 1.0)
    module.trainer = plain_trainer()
    with recorder.dropping(), pytest.raises(MisconfigurationException, match="not registered"):
        module.log("key", 1.0)
    assert recorder.take() == []


def test_barebones_trainers_log_nothing():
    module = Packed(logs([1.0, 2.0]))
    options = dict.fromkeys(["logger", "enable_checkpointing", "num_sanity_val_steps"])
    with pytest.warns(UserWarning, match=r"You are trying to `self.log\(\)` but `Trainer\(barebones=True\)`"):
        plain_trainer(barebones=True, **options).fit(module)
    assert module.entries == []


def test_a_class_that_overrides_log():
    class Prefixed(Packed):
        def log(self, name, value, **options):
            super().log(f"train/{name}", value, prog_bar=True, **options)

    module = Prefixed(logs([1.0, 2.0], on_epoch=True))
    plain_trainer().fit(module)
    assert module.trainer.progress_bar_metrics["train/key_step"] == pytest.approx(5 / 3)


def test_validation_defaults_to_the_epoch():
    class Validated(Packed):
        def validation_step(self, batch, batch_idx):
            self.training_step(batch, batch_idx)

        val_dataloader = Packed.train_dataloader

    module = Validated(logs([1.0, 2.0, 3.0, 5.0]), packs=((3, 4), (1, 2)))
    [result] = plain_trainer().validate(module)
    assert result == {"key": pytest.approx((3 + 8 + 3 + 10) / 10)}
    assert [(entry.batch_size, entry.shows_step) for entry in module.entries] == [(3, False)]
