"""Our callbacks against formulas, and Lightning's that work, or are refused, on a mesh."""

import csv
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    DeviceStatsMonitor,
    ModelSummary,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.callbacks import EMAWeightAveraging as LightningEMA
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm as lightning_grad_norm
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from d9d.core.dist_context import DeviceMeshParameters
from d9d_lightning import D9DStrategy, grad_norm, read_checkpoint
from d9d_lightning.callbacks import EMAWeightAveraging, GradientNormLogger
from d9d_lightning.trainer.refusals import check_callbacks
from tests.d9d_lightning.support import (
    Regression,
    build_trainer,
    full,
    full_state,
    make_samples,
    plain_trainer,
    rank_loader,
    seeded,
)

REPLICATE, SHARD = {"data_parallel_replicate": 2}, {"data_parallel_shard": 2}
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
DECAY = 0.75


class Recorded(Regression):
    """Keeps the weights after each optimizer step, and those that validation sees."""

    def __init__(self):
        super().__init__()
        self.after_step = []
        self.in_validation = []

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.after_step.append(full_state(self))

    def validation_step(self, batch, batch_idx):
        self.in_validation.append(float(F.mse_loss(self(batch[0]), batch[1])))


def ema_of(states, decay=DECAY):
    average = dict(states[0])
    for state in states[1:]:
        average = {name: decay * average[name] + (1 - decay) * state[name] for name in average}
    return average


def loaders(num_samples=16):
    loader = rank_loader(make_samples(num_samples), 4, dist.get_rank(), 2)
    return {"train_dataloaders": loader, "val_dataloaders": loader}


def loss_with(state, num_samples=16):
    """Loss of the last batch of this rank with given weights, on one process."""
    module = seeded(Regression)
    module.load_state_dict(state)
    x, y = list(rank_loader(make_samples(num_samples), 4, dist.get_rank(), 2))[-1]
    return float(F.mse_loss(module(x), y))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [REPLICATE, SHARD], ids=str)
def test_ema_follows_the_formula(mesh, tmp_path):
    module = seeded(Recorded)
    trainer = build_trainer(mesh, callbacks=[EMAWeightAveraging(DECAY)], max_epochs=2)
    trainer.fit(module, **loaders())
    assert len(module.after_step) == 8
    # Validation sees the average, and training goes on from the weights.
    for epoch in (1, 2):
        expected = loss_with(ema_of(module.after_step[: 4 * epoch]))
        assert module.in_validation[4 * epoch - 1] == pytest.approx(expected, rel=1e-12)
    average = ema_of(module.after_step)
    torch.testing.assert_close(full_state(module), average, **TOLERANCE)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    checkpoint = read_checkpoint(tmp_path / "end.ckpt")
    torch.testing.assert_close(checkpoint["state_dict"], average, **TOLERANCE)
    torch.testing.assert_close(checkpoint["current_model_state"], module.after_step[-1], rtol=0, atol=0)
    assert checkpoint["averaging_state"]["n_averaged"] == 8


@pytest.mark.world_size(2)
def test_ema_trains_as_without_it():
    with_ema, without = seeded(Recorded), seeded(Recorded)
    build_trainer(SHARD, callbacks=[EMAWeightAveraging(DECAY)], max_epochs=2).fit(with_ema, **loaders())
    build_trainer(SHARD, max_epochs=2).fit(without, **loaders())
    torch.testing.assert_close(with_ema.after_step, without.after_step, rtol=0, atol=0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("goal", [REPLICATE, SHARD], ids=str)
def test_ema_resumes_on_another_mesh(goal, tmp_path):
    whole = seeded(Recorded)
    build_trainer(SHARD, callbacks=[EMAWeightAveraging(DECAY)], max_epochs=2).fit(whole, **loaders())
    trainer = build_trainer(SHARD, callbacks=[EMAWeightAveraging(DECAY)])
    trainer.fit(seeded(Recorded), **loaders())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = seeded(Recorded, seed=5)
    trainer = build_trainer(goal, callbacks=[EMAWeightAveraging(DECAY)], max_epochs=2)
    trainer.fit(resumed, **loaders(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    torch.testing.assert_close(full_state(resumed), full_state(whole), **TOLERANCE)


@pytest.mark.world_size(2)
def test_lightnings_ema_resumes_from_ours(tmp_path):
    trainer = build_trainer(SHARD, callbacks=[EMAWeightAveraging(DECAY)])
    trainer.fit(seeded(Recorded), **loaders())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    results = []
    for callback in (LightningEMA(decay=DECAY), EMAWeightAveraging(DECAY)):
        module = seeded(Recorded)
        trainer = build_trainer(REPLICATE, callbacks=[callback], max_epochs=2)
        trainer.fit(module, **loaders(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
        results.append(full_state(module))
    torch.testing.assert_close(results[0], results[1], **TOLERANCE)


@pytest.mark.world_size(2)
def test_ema_starts_late_and_skips_steps():
    module = seeded(Recorded)
    callback = EMAWeightAveraging(DECAY, update_every_n_steps=2, update_starting_at_step=3)
    build_trainer(SHARD, callbacks=[callback], max_epochs=2).fit(module, **loaders())
    # Step indices 4 and 6.
    average = ema_of([module.after_step[4], module.after_step[6]])
    torch.testing.assert_close(full_state(module), average, **TOLERANCE)
    assert module.in_validation[3] == pytest.approx(loss_with(module.after_step[3]), rel=1e-12)


@pytest.mark.world_size(2)
def test_mean_of_all_updates():
    module = seeded(Recorded)
    build_trainer(SHARD, callbacks=[EMAWeightAveraging(None)]).fit(module, **loaders())
    mean = {name: sum(state[name] for state in module.after_step) / 4 for name in module.after_step[0]}
    torch.testing.assert_close(full_state(module), mean, **TOLERANCE)


class Normed(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 1)
        self.means = []

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.head(self.norm(batch[0])).squeeze(-1), batch[1])

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.means.append(self.norm.running_mean.clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("use_buffers", [True, False])
def test_ema_of_buffers_is_that_of_the_first_rank(use_buffers):
    module = seeded(Normed)
    trainer = build_trainer(SHARD, callbacks=[EMAWeightAveraging(DECAY, use_buffers=use_buffers)])
    trainer.fit(module, **loaders())
    means = torch.stack(module.means)
    dist.broadcast(means, 0)
    expected = ema_of([{"mean": mean} for mean in means])["mean"] if use_buffers else module.means[-1]
    torch.testing.assert_close(module.norm.running_mean, expected, **TOLERANCE)
    assert module.norm.num_batches_tracked == 4


def test_half_precision_averages_move():
    callback = EMAWeightAveraging(0.999)
    module = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    for value in (1.0, 2.0):
        module.weight.data.fill_(value)
        callback._update(module)
    # 1.001 is 1 in bfloat16.
    torch.testing.assert_close(callback._averages["weight"], torch.tensor([[1.001]]))


class Failing(Recorded):
    def validation_step(self, batch, batch_idx):
        raise ValueError("in validation")


@pytest.mark.world_size(2)
def test_weights_are_back_after_a_failure_in_validation(tmp_path):
    module = seeded(Failing)
    callbacks = [OnExceptionCheckpoint(tmp_path), EMAWeightAveraging(DECAY)]
    with pytest.raises(ValueError, match="in validation"):
        build_trainer(SHARD, callbacks=callbacks, enable_checkpointing=True).fit(module, **loaders())
    torch.testing.assert_close(full_state(module), module.after_step[-1], rtol=0, atol=0)
    checkpoint = read_checkpoint(tmp_path / "on_exception.ckpt")
    torch.testing.assert_close(checkpoint["state_dict"], ema_of(module.after_step), **TOLERANCE)
    torch.testing.assert_close(checkpoint["current_model_state"], module.after_step[-1], rtol=0, atol=0)


@pytest.mark.parametrize("kwargs", [{"decay": 1.5}, {"update_every_n_steps": -1}])
def test_bad_options_are_refused(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        EMAWeightAveraging(**kwargs)


# Refusals


@pytest.mark.world_size(2)
def test_all_refused_callbacks_come_in_one_error():
    callbacks = [StochasticWeightAveraging(0.1), LightningEMA(), WeightAveraging(), BatchSizeFinder()]
    trainer = build_trainer(SHARD, callbacks=callbacks)
    with pytest.raises(NotImplementedError) as caught:
        trainer.fit(seeded(Regression), **loaders())
    text = str(caught.value)
    for part in (
        "StochasticWeightAveraging",
        "lightning's EMA",
        "lightning's Weight",
        "BatchSize",
        "data_parallel_shard=2",
    ):
        assert part in text
    assert text.count("d9d_lightning.callbacks.EMAWeightAveraging") == 3


@pytest.mark.parametrize("degree", ["pipeline_parallel", "tensor_parallel"])
def test_other_ways_to_split_weights_refuse_swa_too(degree):
    trainer = plain_trainer(callbacks=[StochasticWeightAveraging(0.1)])
    with pytest.raises(NotImplementedError, match=f"{degree}=2"):
        check_callbacks(trainer, DeviceMeshParameters(**{degree: 2}), Regression())


@pytest.mark.world_size(2)
def test_swa_works_on_replicas():
    module = seeded(Recorded)
    swa = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)
    build_trainer(REPLICATE, callbacks=[swa], max_epochs=3).fit(module, **loaders(8))
    # Lightning averages the weights at the starts of epochs 0, 1 and 2.
    starts = [full_state(seeded(Recorded)), module.after_step[1], module.after_step[3]]
    mean = {name: sum(start[name] for start in starts) / 3 for name in starts[0]}
    torch.testing.assert_close(full_state(module), mean, **TOLERANCE)


@pytest.mark.world_size(2)
def test_tuning_the_batch_size_is_refused():
    module = seeded(Regression)
    module.batch_size = 2
    with pytest.raises(ValueError, match="not supported with distributed strategies"):
        Tuner(build_trainer(REPLICATE)).scale_batch_size(module, **loaders())


# Norms of gradients


class Norms(Regression):
    def __init__(self, norm_type=2.0):
        super().__init__()
        self.norm_type = norm_type
        self.expected = []
        self.norms = []

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        plain = seeded(Regression)
        for name, parameter in plain.named_parameters():
            parameter.grad = self.seen_gradients[-1][name]
        self.expected.append(lightning_grad_norm(plain, self.norm_type))
        with CommDebugMode() as communication:
            self.norms.append(grad_norm(self, self.norm_type))
        self.num_collectives = communication.get_total_counts()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [REPLICATE, SHARD], ids=str)
@pytest.mark.parametrize("norm_type", [2, 1.0, "inf"])
def test_grad_norm_is_that_of_one_process(mesh, norm_type):
    module = seeded(lambda: Norms(norm_type))
    build_trainer(mesh).fit(module, rank_loader(make_samples(4), 4, dist.get_rank(), 2))
    (norms,), (expected,) = module.norms, module.expected
    assert list(norms) == list(expected)
    torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0)
    assert module.num_collectives == (1 if mesh == SHARD else 0)


def test_grad_norm_without_a_trainer():
    module = seeded(Regression)
    assert grad_norm(module, 2) == {}
    module(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    torch.testing.assert_close(grad_norm(module, 3, "."), lightning_grad_norm(module, 3, "."))
    with pytest.raises(ValueError, match="positive"):
        grad_norm(module, 0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}], ids=str)
def test_gradient_norms_are_logged(options, tmp_path):
    module = seeded(Norms)
    logger = CSVLogger(tmp_path)
    trainer = build_trainer(SHARD, callbacks=[GradientNormLogger()], logger=logger, log_every_n_steps=1, **options)
    trainer.fit(module, rank_loader(make_samples(16), 4, dist.get_rank(), 2))
    expected = [float(norms["grad_2.0_norm_total"]) for norms in module.expected]
    assert float(trainer.callback_metrics["grad_norm"]) == pytest.approx(expected[-1])
    if trainer.is_global_zero:
        with Path(logger.experiment.metrics_file_path).open(newline="") as file:
            assert [float(row["grad_norm"]) for row in csv.DictReader(file)] == pytest.approx(expected)


def test_gradient_norm_logger_needs_our_strategy():
    with pytest.raises(ValueError, match="D9DStrategy"):
        plain_trainer(callbacks=[GradientNormLogger()]).fit(seeded(Regression), rank_loader(make_samples(4), 4, 0, 1))


# Lightning's own tools


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [REPLICATE, SHARD], ids=str)
def test_learning_rate_finder(mesh, tmp_path):
    module = seeded(Regression)
    trainer = build_trainer(mesh, default_root_dir=tmp_path)
    before = full_state(module)
    finder = Tuner(trainer).lr_find(module, rank_loader(make_samples(64), 4, dist.get_rank(), 2), num_training=14)
    suggestion = finder.suggestion(skip_begin=1, skip_end=1)
    assert 1e-8 < suggestion < 1
    torch.testing.assert_close(full_state(module), before, rtol=0, atol=0)
    suggestions = [None, None]
    dist.all_gather_object(suggestions, suggestion)
    assert suggestions[0] == suggestions[1]
    module.hparams.learning_rate = suggestion
    trainer.fit(module, **loaders())


@pytest.mark.world_size(2)
def test_summary_counts_the_whole_model():
    class Kept(ModelSummary):
        @staticmethod
        def summarize(summary_data, total_parameters, *args, **kwargs):
            columns = dict(summary_data)
            kept.append((columns["Params"], columns["Params per Device"], total_parameters))

    kept = []
    trainer = build_trainer(SHARD, callbacks=[Kept()])
    trainer.fit(seeded(Regression), **loaders())
    # 2 x (36 + 6) in the blocks, 7 in the head; its weight of one row is on the first rank, and so is its bias.
    assert kept == ([(["84  ", "7  "], ["42  ", "7  "], 91)] if trainer.is_global_zero else [])


@pytest.mark.world_size(2)
def test_timer_stops_all_ranks_and_devices_are_watched(tmp_path):
    module = seeded(Regression)
    # Only the clock of rank 0 counts.
    timer = Timer({"seconds": 0 if dist.get_rank() == 0 else 100})
    logger = CSVLogger(tmp_path)
    trainer = build_trainer(
        SHARD, callbacks=[timer, DeviceStatsMonitor(cpu_stats=False)], logger=logger, max_epochs=1000, min_epochs=0
    )
    trainer.fit(module, **loaders())
    assert trainer.should_stop
    steps = [None, None]
    dist.all_gather_object(steps, trainer.global_step)
    assert steps[0] == steps[1] < 8


def test_strategy_measures_on_one_process():
    strategy = D9DStrategy()
    module = nn.Linear(1, 2, bias=False)
    module.weight.grad = torch.tensor([[3.0], [4.0]])
    trainer = plain_trainer(strategy=strategy)
    trainer.strategy.measure_grad_norm(torch.optim.SGD(module.parameters(), lr=1.0))
    assert full(strategy.last_grad_norm) == 5.0
