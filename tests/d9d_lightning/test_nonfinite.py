"""Steps that are not finite: all ranks decide alike, and a step that is left out changes neither weights nor optimizer."""

import math
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from d9d.internals.nonfinite import NonfiniteStepError
from d9d_lightning import D9DStrategy
from tests.d9d_lightning import test_expert_parallel as expert_job
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
BAD_BATCH = 2
NUM_BATCHES = 5
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def loader(num_batches=NUM_BATCHES):
    return rank_loader(make_samples(4 * num_batches), 4, dist.get_rank(), 2)


class Bad(Regression):
    """One batch has a bad loss, on one rank, by `spoil`."""

    rank = 1

    def spoil(self, loss):
        return loss * math.nan

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        is_bad = batch_idx == BAD_BATCH and self.trainer.global_rank == self.rank
        return self.spoil(loss) if is_bad else loss


class InfiniteConstant(Bad):
    """The gradients stay finite."""

    def spoil(self, loss):
        return loss + math.inf


class BadGradients(Bad):
    """The loss stays finite: a square root has an infinite slope at 0."""

    def spoil(self, loss):
        return (loss * 0.0).sqrt()


class LeftOut(Regression):
    """What a step that is left out does: nothing."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx == BAD_BATCH:
            optimizer_closure()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class StatesByStep(Callback):
    def __init__(self):
        self.states = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        optimizer = trainer.optimizers[0]
        moments = [
            full(value).clone() for state in optimizer.state_dict()["state"].values() for value in state.values()
        ]
        self.states.append([*moments, *(value.clone() for value in full_state(module).values())])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [REPLICATE, SHARD], ids=["replicate", "shard"])
@pytest.mark.parametrize("bad", [Bad, InfiniteConstant, BadGradients])
@pytest.mark.parametrize(
    "clipping",
    [{}, {"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}],
    ids=["unclipped", "norm", "value"],
)
def test_a_bad_step_is_left_out_by_all_ranks(mesh, bad, clipping):
    states = StatesByStep()
    module = seeded(bad)
    trainer = build_trainer(mesh, strategy_options={"on_nonfinite": "skip"}, callbacks=[states], **clipping)
    trainer.fit(module, loader())
    assert trainer.strategy.nonfinite_steps.num_skipped == 1
    assert trainer.global_step == NUM_BATCHES
    for before, after in zip(states.states[BAD_BATCH - 1], states.states[BAD_BATCH], strict=True):
        assert torch.equal(before, after)
    plain = seeded(LeftOut)
    whole = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*make_samples(4 * NUM_BATCHES)), batch_size=4)
    plain_trainer(**clipping).fit(plain, whole)
    for name, value in full_state(module).items():
        torch.testing.assert_close(value, plain.state_dict()[name], **EXACT)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [REPLICATE, SHARD], ids=["replicate", "shard"])
def test_a_bad_step_ends_the_fit_on_all_ranks(mesh):
    states = StatesByStep()
    module = seeded(Bad)
    trainer = build_trainer(mesh, strategy_options={"on_nonfinite": "raise"}, callbacks=[states])
    with pytest.raises(
        NonfiniteStepError, match=r"step 3: the gradient norm is nan, the loss is not finite on rank 1\."
    ):
        trainer.fit(module, loader())
    weights = list(full_state(module).values())
    for before, after in zip(states.states[-1][-len(weights) :], weights, strict=True):
        assert torch.equal(before, after)


@pytest.mark.world_size(2)
def test_by_default_nobody_looks():
    module = seeded(Bad)
    trainer = build_trainer(REPLICATE)
    trainer.fit(module, loader())
    assert trainer.strategy.nonfinite_steps.num_skipped == 0
    assert torch.isnan(module.head.weight).any()


@pytest.mark.world_size(2)
def test_a_bad_batch_spoils_its_window_alone():
    """The bad batch is the first of the second window of two."""
    module = seeded(InfiniteConstant)
    trainer = build_trainer(REPLICATE, strategy_options={"on_nonfinite": "skip"}, accumulate_grad_batches=2)
    trainer.fit(module, loader(6))
    assert trainer.strategy.nonfinite_steps.num_skipped == 1
    assert trainer.global_step == 3


@pytest.mark.world_size(2)
def test_microbatches():
    class OneMicrobatch(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            is_bad = batch_idx == BAD_BATCH and self.trainer.global_rank == 0 and len(self.losses) % 2
            return loss + math.inf if is_bad else loss

    module = seeded(OneMicrobatch)
    trainer = build_trainer(SHARD, strategy_options={"on_nonfinite": "skip", "microbatches": 2})
    trainer.fit(module, loader())
    assert trainer.strategy.nonfinite_steps.num_skipped == 1


@pytest.mark.world_size(2)
def test_manual_optimization():
    class Manual(Regression):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            loss = F.mse_loss(self(batch[0]), batch[1])
            if batch_idx == BAD_BATCH and self.trainer.global_rank == 0:
                loss = loss * math.nan
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    states = StatesByStep()
    module = seeded(Manual)
    trainer = build_trainer(REPLICATE, strategy_options={"on_nonfinite": "skip"}, callbacks=[states])
    trainer.fit(module, loader())
    assert trainer.strategy.nonfinite_steps.num_skipped == 1
    for before, after in zip(states.states[BAD_BATCH - 1], states.states[BAD_BATCH], strict=True):
        assert torch.equal(before, after)
    assert torch.isfinite(full(module.head.weight)).all()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("bad", [Bad, InfiniteConstant])
def test_pipeline(bad):
    class Staged(bad):
        rank = 1  # the last stage, which alone has losses

        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(*self.blocks, self.head)
            del self.blocks, self.head

        def forward(self, x):
            return self.layers(x).squeeze(-1)

        def on_before_optimizer_step(self, optimizer):
            pass

    module = seeded(Staged)
    trainer = build_trainer(
        {"pipeline_parallel": 2},
        strategy_options={"on_nonfinite": "skip", "pipeline_module": "layers", "microbatches": 2},
    )
    samples = torch.utils.data.TensorDataset(*make_samples(4 * NUM_BATCHES))
    trainer.fit(module, torch.utils.data.DataLoader(samples, batch_size=4))
    assert trainer.strategy.nonfinite_steps.num_skipped == 1
    assert all(torch.isfinite(value).all() for value in module.parameters())


@pytest.mark.world_size(2)
def test_experts():
    class BadExperts(expert_job.Model):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * math.nan if batch_idx == 1 and self.trainer.global_rank == 1 else loss

    states = StatesByStep()
    trainer = build_trainer(
        {"data_parallel_shard": 2, "expert_parallel": 2},
        strategy_options={"parallelize": expert_job.PLAN, "on_nonfinite": "skip"},
        callbacks=[states],
    )
    trainer.fit(seeded(BadExperts), expert_job.loader(4, dist.get_rank(), 2))
    assert trainer.strategy.nonfinite_steps.num_skipped == 1
    first, second, third = states.states
    assert all(torch.equal(before, after) for before, after in zip(first, second, strict=True))
    assert not all(torch.equal(before, after) for before, after in zip(second, third, strict=True))
    assert all(torch.isfinite(value).all() for value in third)


@pytest.mark.world_size(2)
def test_weights_of_zero_are_no_bad_step():
    class Weighted(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            is_empty = batch_idx == BAD_BATCH and self.trainer.global_rank == 0
            weight = torch.tensor(0.0 if is_empty else 1.0)
            return {"loss": loss * 0.0 / 0.0 if is_empty else loss, "loss_weight": weight}

    module = seeded(Weighted)
    trainer = build_trainer(REPLICATE, strategy_options={"on_nonfinite": "skip"})
    trainer.fit(module, loader())
    assert trainer.strategy.nonfinite_steps.num_skipped == 0
    assert torch.isfinite(module.head.weight).all()


def test_one_process():
    module = seeded(Bad)
    module.rank = 0
    trainer = plain_trainer(strategy=D9DStrategy(on_nonfinite="skip"))
    samples = torch.utils.data.TensorDataset(*make_samples(4 * NUM_BATCHES))
    trainer.fit(module, torch.utils.data.DataLoader(samples, batch_size=4))
    assert trainer.strategy.nonfinite_steps.num_skipped == 1
    plain = seeded(LeftOut)
    plain_trainer().fit(plain, torch.utils.data.DataLoader(samples, batch_size=4))
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], **EXACT)


def test_a_strategy_is_pickled_for_processes_that_are_spawned():
    strategy = D9DStrategy(on_nonfinite="skip")
    strategy.precision_plugin = Precision()
    plugin = pickle.loads(pickle.dumps(strategy.precision_plugin))  # noqa: S301  # of our own
    assert vars(plugin)["_after_closure"].args[0] is plugin


def test_unknown_words_and_scalers_are_refused():
    with pytest.raises(ValueError, match=r"on_nonfinite \('stop'\) must be one of 'raise', 'skip', 'ignore'"):
        D9DStrategy(on_nonfinite="stop")
    strategy = D9DStrategy(on_nonfinite="skip")
    scaling = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="does not go with precision='16-mixed'"):
        strategy.precision_plugin = scaling
