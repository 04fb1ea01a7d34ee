"""What steps show of metrics over microbatches: the value over all of their samples, as torchmetrics computes it at once."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torchmetrics import MeanMetric, Metric, MetricCollection, MetricTracker, MinMaxMetric, PearsonCorrCoef, SumMetric
from torchmetrics.classification import BinaryAUROC, BinaryF1Score, BinaryPrecision, BinaryRecall
from torchmetrics.functional import pearson_corrcoef
from torchmetrics.functional.classification import binary_auroc, binary_f1_score, binary_precision, binary_recall
from torchmetrics.utilities.data import dim_zero_cat

from d9d_lightning import D9DStrategy
from d9d_lightning.metrics.pack_values import PackValues
from d9d_lightning.metrics.step_calls import KeptStates, follow_metrics
from tests.d9d_lightning.support import build_trainer, make_samples, plain_trainer, rank_loader, seeded
from tests.d9d_lightning.test_pipeline_parity import Stack

BATCH = 12
TOLERANCE = {"rel": 1e-6, "abs": 1e-7}  # torchmetrics counts in float32
BOTH = {"on_step": True, "on_epoch": True}


class Spread(Metric):
    """Of a user who says nothing about its states, which are updated in place."""

    def __init__(self):
        super().__init__()
        self.add_state("lowest", torch.tensor(torch.inf, dtype=torch.float64), dist_reduce_fx="min")
        self.add_state("highest", torch.tensor(-torch.inf, dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, values):
        self.lowest.clamp_(max=values.min())
        self.highest.clamp_(min=values.max())
        self.seen.append(values)

    def compute(self):
        return (self.highest - self.lowest) * dim_zero_cat(self.seen).mean()


class OwnForward(MeanMetric):
    def forward(self, value):
        self._forward_cache = super().forward(value) + 100
        return self._forward_cache


class Scored(Stack):
    """Scores what is in the batch, so that the values do not depend on training."""

    def __init__(self):
        super().__init__()
        self.f1 = BinaryF1Score()
        self.auroc = BinaryAUROC()
        self.pearson = PearsonCorrCoef()
        self.spread = Spread()
        self.twice = BinaryF1Score()
        self.sum = BinaryF1Score() + self.auroc * 2
        self.group = MetricCollection({"p": BinaryPrecision(), "r": BinaryRecall()})
        self.tracker = MetricTracker(BinaryF1Score(), maximize=True)
        self.on_ranks = BinaryF1Score(dist_sync_on_step=True)
        self.own = OwnForward()
        self.updated = BinaryF1Score()
        self.count = SumMetric()
        self.val_f1 = BinaryF1Score()
        self.shown = []

    def on_train_epoch_start(self):
        self.tracker.increment()

    def training_step(self, batch, batch_idx):
        x, y = batch
        score, label = (x[:, 0] + y).sigmoid(), (y > 0).long()
        self.twice(1 - score, label)
        for metric in (self.f1, self.auroc, self.twice, self.sum, self.group, self.tracker, self.on_ranks):
            metric(score, label)
        self.pearson(score, y)
        self.spread(score)
        self.own(score)
        self.updated.update(score, label)
        self.count.update(len(x))
        self.log("count", self.count, on_step=False, on_epoch=True)
        for name in ("f1", "auroc", "twice", "sum", "on_ranks", "pearson", "spread", "own", "updated"):
            self.log(name, self.get_submodule(name), **BOTH)
        self.log("tracker", self.tracker[-1], **BOTH)
        self.log_dict(self.group, **BOTH)
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.loss(batch)
        x, y = batch
        self.val_f1((x[:, 0] + y).sigmoid(), (y > 0).long())
        self.log("val_f1", self.val_f1, **BOTH)

    def on_train_batch_end(self, *args):
        self.shown.append(step_values(self.trainer.callback_metrics))


def step_values(metrics):
    return {name.removesuffix("_step"): float(value) for name, value in metrics.items() if name.endswith("_step")}


def expected(x, y):
    """The values of the samples of a batch, at once."""
    score, label = (x[:, 0] + y).sigmoid(), (y > 0).long()
    f1, auroc = binary_f1_score(score, label), binary_auroc(score, label)
    values = {"f1": f1, "twice": f1, "tracker": f1, "on_ranks": f1, "auroc": auroc, "sum": f1 + 2 * auroc}
    values |= {"p": binary_precision(score, label), "r": binary_recall(score, label)}
    values |= {"pearson": pearson_corrcoef(score, y), "spread": (score.max() - score.min()) * score.mean()}
    return {name: float(value) for name, value in values.items()}


def known(shown):
    """Without what has a way of its own to its value."""
    return {name: value for name, value in shown.items() if name not in ("own", "own_epoch", "updated")}


def check_epoch(metrics, x, y):
    # One was called with other samples, too.
    values = {name: value for name, value in expected(x, y).items() if name != "twice"}
    # The pipelined call comes behind the metrics.
    assert metrics["count"] == len(x)
    assert {name: float(metrics[f"{name}_epoch"]) for name in values} == pytest.approx(values, **TOLERANCE)


def fit(trainer, samples, batch_size, rank=0, world_size=1, **options):
    module = seeded(Scored)
    trainer.fit(module, rank_loader(samples, batch_size, rank, world_size), **options)
    return module


@pytest.mark.parametrize("microbatches", [1, 3])
def test_steps_show_whole_batches(microbatches):
    samples = make_samples(3 * BATCH)
    trainer = plain_trainer(strategy=D9DStrategy(microbatches=microbatches))
    module = fit(trainer, samples, BATCH)
    parts = [expected(*(tensor[start : start + BATCH] for tensor in samples)) for start in (0, BATCH, 2 * BATCH)]
    for shown, values in zip(module.shown, parts, strict=True):
        assert known(shown) == pytest.approx(values, **TOLERANCE)
    check_epoch(trainer.callback_metrics, *samples)
    one = plain_trainer()
    plain = fit(one, samples, BATCH)
    assert module.shown[-1].keys() == plain.shown[-1].keys()
    assert not any({"forward", "_wrap_update"} & vars(child).keys() for child in module.modules())


@pytest.mark.world_size(2)
def test_all_stages_show_whole_windows():
    samples = make_samples(4 * BATCH)
    trainer = build_trainer(
        {"pipeline_parallel": 2},
        strategy_options={"pipeline_module": "model", "microbatches": 3},
        accumulate_grad_batches=2,
        limit_val_batches=1,
    )
    module = fit(trainer, samples, BATCH, val_dataloaders=rank_loader(samples, BATCH, 0, 1))
    halves = [expected(*(tensor[start : start + 2 * BATCH] for tensor in samples)) for start in (0, 2 * BATCH)]
    for shown, values in zip(module.shown[1::2], halves, strict=True):
        assert known(shown) == pytest.approx(values, **TOLERANCE)
    check_epoch(trainer.callback_metrics, *samples)
    assert float(trainer.callback_metrics["val_f1_epoch"]) == pytest.approx(
        expected(*(tensor[:BATCH] for tensor in samples))["f1"], **TOLERANCE
    )


class Limited(Metric):
    """Computes no value of more than two updates."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", [], dist_reduce_fx="cat")
        self.longest = 0

    def update(self, values):
        self.seen.append(values)
        self.longest = max(self.longest, len(self.seen))

    def compute(self):
        if len(self.seen) > 2:
            raise LookupError(f"boom at {len(self.seen)} updates")
        return dim_zero_cat(self.seen).mean()


class UsesLimited(Stack):
    def __init__(self):
        super().__init__()
        self.limited = Limited()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.limited(batch[1])
        self.log("limited", self.limited, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.limited(batch[1])
        self.limited.reset()
        return loss


def stages(microbatches):
    return build_trainer(
        {"pipeline_parallel": 2}, strategy_options={"pipeline_module": "model", "microbatches": microbatches}
    )


@pytest.mark.world_size(2)
@pytest.mark.parametrize("run", ["fit", "validate"])
def test_a_value_that_cannot_be_computed_is_an_error_on_all_stages(run):
    loader = rank_loader(make_samples(BATCH), BATCH, 0, 1)
    trainer = stages(3)
    with pytest.raises(RuntimeError, match="LookupError: boom at 3 updates"):
        (trainer.fit if run == "fit" else trainer.validate)(seeded(UsesLimited), loader)


@pytest.mark.world_size(2)
def test_predictions_sum_nothing_up():
    module = seeded(UsesLimited)
    stages(2).predict(module, rank_loader(make_samples(4 * BATCH), BATCH, 0, 1))
    # Of the microbatches of one batch, where the step runs.
    assert module.limited.longest == (2 if dist.get_rank() == 1 else 0)


@pytest.mark.world_size(2)
def test_replicas_show_their_own_batch_or_that_of_all():
    samples = make_samples(2 * BATCH)
    rank = dist.get_rank()
    trainer = build_trainer({"data_parallel_replicate": 2}, strategy_options={"microbatches": 3})
    module = fit(trainer, samples, BATCH, rank, 2)
    own = [(x, y) for x, y in rank_loader(samples, BATCH, rank, 2)]
    for index, shown in enumerate(module.shown):
        span = slice(index * BATCH, (index + 1) * BATCH)
        values = expected(*own[index]) | {"on_ranks": expected(samples[0][span], samples[1][span])["f1"]}
        assert known(shown) == pytest.approx(values, **TOLERANCE)
    check_epoch(trainer.callback_metrics, *samples)


class MakesMetrics(Stack):
    """Makes a metric in its second step."""

    def __init__(self):
        super().__init__()
        self.shown = []

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and "late" not in self._modules:
            self.late = MeanMetric()
        if batch_idx:
            self.late(batch[0][:, 0])
            self.log("late", self.late, **BOTH)
        return self.loss(batch)

    on_train_batch_end = Scored.on_train_batch_end


def test_a_metric_that_a_step_makes_shows_its_last_microbatch_once():
    module = seeded(MakesMetrics)
    x, _ = samples = make_samples(3 * BATCH)
    trainer = plain_trainer(strategy=D9DStrategy(microbatches=3))
    trainer.fit(module, rank_loader(samples, BATCH, 0, 1))
    last_part, whole = x[2 * BATCH - 4 : 2 * BATCH, 0], x[2 * BATCH :, 0]
    assert [shown["late"] for shown in module.shown[1:]] == pytest.approx(
        [float(last_part.mean()), float(whole.mean())], **TOLERANCE
    )
    assert float(trainer.callback_metrics["late_epoch"]) == pytest.approx(float(x[BATCH:, 0].mean()), **TOLERANCE)


def test_copies_are_noted_by_themselves():
    holder = torch.nn.ModuleList([MeanMetric()])
    follow_metrics(holder)
    copies = [copy.deepcopy(holder[0]), holder[0].clone(), pickle.loads(pickle.dumps(holder[0]))]  # noqa: S301  # our own
    copies += [copy.copy(holder[0]), copy.copy(copy.copy(holder[0]))]
    for metric in copies:
        values = PackValues()
        for number in (1.0, 2.0):
            values.begin_microbatch()
            assert metric(number) == number
            values.end_microbatch()
        values.show(metric)
        assert metric._forward_cache == 1.5
        metric.update(4.0)
        assert metric(6.0) == 6
        assert metric.update_count == 4
        assert metric.compute() == (1 + 2 + 4 + 6) / 4
    assert not holder[0].update_called
    assert holder[0](3.0) == 3
    assert (holder[0].update_count, holder[0].compute()) == (1, 3)


def test_what_is_kept_counts_nowhere():
    holder = torch.nn.ModuleList([MeanMetric(), Spread(), copy.deepcopy(MeanMetric())])
    follow_metrics(holder)
    metrics = [*holder, holder[0].clone()]
    values = PackValues()
    for number in (1.0, 2.0):
        tensor = torch.tensor([number, number + 2])
        with KeptStates():
            for metric in metrics:
                metric.update(tensor * 9)
                assert torch.isfinite(metric(tensor * 9))
        values.begin_microbatch()
        for metric in metrics:
            metric(tensor)
        values.end_microbatch()
    holder[0](8.0)
    for metric in metrics:
        values.show(metric)
    # Of 1, 3, 2 and 4.
    assert [metric._forward_cache.item() for metric in metrics] == [2.5, 7.5, 2.5, 2.5]
    assert [metric.compute().item() for metric in metrics] == pytest.approx([(4 * 2.5 + 8) / 5, 7.5, 2.5, 2.5])
    assert [metric.update_count for metric in metrics] == [3, 2, 2, 2]


def test_what_is_kept_of_a_list_are_its_elements():
    """Copies of them in each microbatch would take ever longer."""
    holder = torch.nn.ModuleList([Spread()])
    follow_metrics(holder)
    metric = holder[0]
    first, second = torch.ones(2), torch.zeros(2)
    metric.update(first)
    with KeptStates():
        metric.update(second)
        assert [id(element) for element in metric.seen] == [id(first), id(second)]
        metric.reset()
    assert [id(element) for element in metric.seen] == [id(first)]
    assert (metric.lowest, metric.update_count) == (1, 1)


def test_values_of_wrappers_are_as_ever():
    holder = torch.nn.ModuleList([MinMaxMetric(MeanMetric())])
    follow_metrics(holder)
    values = PackValues()
    for number in (1.0, 2.0):
        values.begin_microbatch()
        holder[0](number)
        values.end_microbatch()
    values.show(holder[0])
    assert holder[0]._forward_cache["raw"] == 2
