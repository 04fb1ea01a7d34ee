"""What steps of a pipeline leave behind: random numbers, buffers, metrics, memory, frozen stages, uneven replicas."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric

from d9d_lightning import read_checkpoint
from tests.d9d_lightning.support import (
    NUM_FEATURES,
    Block,
    build_trainer,
    make_samples,
    plain_trainer,
    rank_loader,
    seeded,
)
from tests.d9d_lightning.test_pipeline_parity import BATCH, TOLERANCE, Stack

PIPELINE = {"pipeline_parallel": 2}
OPTIONS = {"pipeline_module": "model"}


def of_all_ranks(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Noisy(Dataset):
    """Draws its samples from the generators of the process."""

    def __len__(self):
        return 4 * BATCH

    def __getitem__(self, index):
        return torch.randn(NUM_FEATURES), torch.randn(())


class Dropping(Stack):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(*[nn.Sequential(Block(8), nn.Dropout(0.5)) for _ in range(4)])
        self.sums = []

    def on_train_batch_start(self, batch, batch_idx):
        self.sums.append(batch[0].sum().item())


@pytest.mark.world_size(2)
def test_peers_go_on_with_the_same_random_numbers_though_stages_draw_their_own():
    torch.manual_seed(dist.get_rank())  # nobody has seeded them alike
    trainer = build_trainer(PIPELINE, max_epochs=2, strategy_options=OPTIONS)
    module = Dropping().float()
    trainer.fit(module, DataLoader(Noisy(), batch_size=BATCH, shuffle=True))
    first, second = of_all_ranks(module.sums)
    assert first == second
    assert len(set(first)) == 8


class Counting(Stack):
    def __init__(self):
        super().__init__()
        self.register_buffer("num_validated", torch.zeros(()))
        self.mean = MeanMetric()
        self.mean.persistent(True)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.mean.update(torch.ones(()))
        return loss

    def validation_step(self, batch, batch_idx):
        self.loss(batch)
        self.num_validated += 1


@pytest.mark.world_size(2)
def test_what_steps_change_is_saved_as_the_last_stage_has_it(tmp_path):
    trainer = build_trainer(PIPELINE, strategy_options=OPTIONS)
    module = seeded(Counting)
    loader = rank_loader(make_samples(2 * BATCH), BATCH, 0, 1)
    trainer.fit(module, loader, loader)
    assert of_all_ranks(module.num_validated.item()) == [2.0, 2.0]
    path = of_all_ranks(str(tmp_path / "saved.ckpt"))[0]
    trainer.save_checkpoint(path)
    state = read_checkpoint(path)["state_dict"]
    assert state["mean.weight"].item() == 2.0


@pytest.mark.world_size(2)
def test_a_module_that_was_trained_in_a_pipeline_is_freed():
    trainer = build_trainer(PIPELINE, strategy_options=OPTIONS)
    module = seeded(Stack)
    trainer.fit(module, rank_loader(make_samples(BATCH), BATCH, 0, 1))
    alive = weakref.ref(module)
    del trainer, module
    gc.collect()
    assert alive() is None


class Unfreeze(Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            for parameter in [*module.embed.parameters(), *module.model[0].parameters(), *module.model[1].parameters()]:
                parameter.requires_grad_(True)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_the_first_stages_may_be_unfrozen(schedule):
    samples = make_samples(2 * BATCH)
    losses = []
    for trainer in (
        build_trainer(
            PIPELINE, max_epochs=2, callbacks=[Unfreeze()], strategy_options={**OPTIONS, "schedule": schedule}
        ),
        plain_trainer(max_epochs=2, callbacks=[Unfreeze()]),
    ):
        module = seeded(Stack)
        for parameter in [*module.embed.parameters(), *module.model[0].parameters(), *module.model[1].parameters()]:
            parameter.requires_grad_(False)
        trainer.fit(module, rank_loader(samples, BATCH, 0, 1))
        losses.append(torch.stack(module.losses))
    torch.testing.assert_close(losses[0], losses[1], rtol=TOLERANCE, atol=TOLERANCE)


class Predicting(Stack):
    def predict_step(self, batch, batch_idx):
        return self.head(self.model(torch.tanh(self.embed(batch[0])))).squeeze(-1)


@pytest.mark.world_size(4)
def test_replicas_of_sharded_stages_may_have_other_numbers_of_microbatches():
    """The last batch of one replica is a single sample, and so a single microbatch."""
    mesh = {"pipeline_parallel": 2, "data_parallel_shard": 2}
    trainer = build_trainer(mesh, strategy_options={**OPTIONS, "microbatches": 2})
    module = seeded(Predicting)
    samples = make_samples(7)
    replica = trainer.strategy.distributed_sampler_kwargs["rank"]
    rows = slice(0, 4) if replica == 0 else slice(4, 7)
    own = [tensor[rows] for tensor in samples]
    predictions = torch.cat(trainer.predict(module, rank_loader(own, 2, 0, 1)))
    whole = seeded(Predicting)
    with torch.no_grad():
        expected = whole.predict_step(samples, 0)
    torch.testing.assert_close(predictions, expected[rows][: len(predictions)], rtol=TOLERANCE, atol=TOLERANCE)


class ObjectBatch:
    def __init__(self, x, y):
        self.x, self.y = x, y


class ShiftsTargets(Stack):
    def training_step(self, batch, batch_idx):
        batch.y = batch.y + 1
        hidden = self.model(torch.tanh(self.embed(batch.x)))
        return F.mse_loss(self.head(hidden).squeeze(-1), batch.y)

    def split_batch(self, batch, num_microbatches):
        return [batch]


@pytest.mark.world_size(2)
def test_a_batch_that_is_an_object_may_be_changed():
    batch = make_samples(BATCH)
    results = []
    for trainer in (build_trainer(PIPELINE, strategy_options=OPTIONS), plain_trainer()):
        module = seeded(ShiftsTargets)
        trainer.fit(module, DataLoader([ObjectBatch(*batch)], batch_size=None))
        results.append(module.seen_gradients[0]["head.bias"])
    torch.testing.assert_close(results[0], results[1], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.world_size(2)
def test_sharded_ranks_may_have_different_numbers_of_batches_to_predict():
    """Five samples by Lightning's own sampler, which does not pad: three batches and two."""
    trainer = build_trainer({"data_parallel_shard": 2}, use_distributed_sampler=True)
    module = seeded(Predicting)
    x, y = make_samples(5)
    predictions = torch.cat(trainer.predict(module, DataLoader(TensorDataset(x, y), batch_size=1)))
    whole = seeded(Predicting)
    with torch.no_grad():
        expected = whole.predict_step((x, y), 0)[dist.get_rank() :: 2]
    torch.testing.assert_close(predictions, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.world_size(4)
def test_replicas_of_sharded_stages_may_have_other_numbers_of_batches():
    """Three samples over two replicas: two batches and one."""
    mesh = {"pipeline_parallel": 2, "data_parallel_shard": 2}
    trainer = build_trainer(mesh, strategy_options=OPTIONS, use_distributed_sampler=True)
    x, y = make_samples(3)
    predictions = trainer.predict(seeded(Predicting), DataLoader(TensorDataset(x, y), batch_size=1))
    with torch.no_grad():
        expected = seeded(Predicting).predict_step((x, y), 0)[trainer.strategy.distributed_sampler_kwargs["rank"] :: 2]
    torch.testing.assert_close(torch.cat(predictions), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("plan", [None, {"": "shard"}], ids=str)
def test_a_parameter_without_dimensions_is_replicated_among_shards(plan):
    """The temperature of the module, against one process."""
    gradients = []
    samples = make_samples(2 * BATCH)
    for trainer, (rank, size) in (
        (build_trainer({"data_parallel_shard": 2}, strategy_options={"parallelize": plan}), (dist.get_rank(), 2)),
        (plain_trainer(), (0, 1)),
    ):
        module = seeded(Stack)
        trainer.fit(module, rank_loader(samples, BATCH, rank, size))
        gradients.append(module.seen_gradients)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=TOLERANCE, atol=TOLERANCE)
    assert gradients[0][0]["temperature"].ndim == 0
