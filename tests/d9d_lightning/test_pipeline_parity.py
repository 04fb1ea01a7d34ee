"""An unchanged LightningModule, cut into pipeline stages, trains as on one process: against a loop in plain torch."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.d9d_lightning.support import NUM_FEATURES, Block, build_trainer, full, make_samples, rank_loader, seeded

WIDTH = 8
BATCH = 8
NUM_STEPS = 3
CLIP = 0.3

# fp64: only the last bits differ, by the order of sums and by what AdamW's division makes of them.
TOLERANCE = 1e-11

SCHEDULES = [
    "gpipe",
    "1f1b",
    "interleaved",
    "zero_bubble",
    "zero_bubble_v",
    "dual_pipe_v",
    {"schedule": "looped_bfs", "num_stages_per_rank": 2},
]


class Stack(L.LightningModule):
    """A stack of blocks with a projection in front of it, a head and a temperature behind it."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(NUM_FEATURES, WIDTH)
        self.model = nn.Sequential(*[Block(WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 1)
        self.temperature = nn.Parameter(torch.ones(()))
        self.losses = []
        self.seen_gradients = []

    def loss(self, batch):
        x, y = batch
        hidden = self.model(torch.tanh(self.embed(x)))
        return F.mse_loss(self.head(hidden).squeeze(-1) / self.temperature, y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if outputs:
            self.losses.append(outputs["loss"])

    def on_before_optimizer_step(self, optimizer):
        self.seen_gradients.append({name: full(p.grad) for name, p in self.named_parameters() if p.grad is not None})

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def plain_training(accumulate=1):
    """Losses, gradients and final weights of one process, by a loop of plain torch."""
    module = seeded(Stack)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    x, y = make_samples(NUM_STEPS * accumulate * BATCH)
    losses, gradients = [], []
    for step in range(NUM_STEPS):
        total = 0.0
        for part in range(accumulate):
            rows = slice((step * accumulate + part) * BATCH, (step * accumulate + part + 1) * BATCH)
            loss = module.loss((x[rows], y[rows])) / accumulate
            loss.backward()
            total += loss.detach()
        losses.append(total)
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters()})
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, module.state_dict()


def check_training(mesh, schedule, accumulate=1, microbatches=None, **options):
    trainer = build_trainer(
        mesh,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=CLIP,
        strategy_options={"pipeline_module": "model", "schedule": schedule, "microbatches": microbatches, **options},
    )
    module = seeded(Stack)
    dp_size = trainer.strategy.mesh.data_parallel
    samples = make_samples(NUM_STEPS * accumulate * BATCH)
    trainer.fit(module, rank_loader(samples, BATCH, trainer.strategy.distributed_sampler_kwargs["rank"], dp_size))
    losses, gradients, state = plain_training(accumulate)
    own = torch.stack(module.losses)
    dist.all_reduce(own)
    torch.testing.assert_close(own / dist.get_world_size(), torch.stack(losses), rtol=TOLERANCE, atol=TOLERANCE)
    names = set()
    for seen, expected in zip(module.seen_gradients, gradients, strict=True):
        names |= set(seen)
        torch.testing.assert_close(seen, {name: expected[name] for name in seen}, rtol=TOLERANCE, atol=TOLERANCE)
    own_state = {name: full(tensor) for name, tensor in module.state_dict().items()}
    torch.testing.assert_close(own_state, {name: state[name] for name in own_state}, rtol=TOLERANCE, atol=TOLERANCE)
    all_names = [None] * dist.get_world_size()
    dist.all_gather_object(all_names, names)
    assert set().union(*all_names) == set(gradients[0])
    assert {"embed.weight", "head.bias", "temperature"} <= names
    assert 0 < sum(name.startswith("model.") for name in names) < 4 * 2
    return trainer, module


@pytest.mark.world_size(2)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_two_stages_train_like_one_process(schedule):
    check_training({"pipeline_parallel": 2}, schedule, microbatches=4)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("accumulate", "microbatches"), [(3, None), (2, 3), (1, None)])
def test_batches_of_a_window_are_one_pack(accumulate, microbatches):
    check_training({"pipeline_parallel": 2}, "1f1b", accumulate, microbatches)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("axis", ["data_parallel_replicate", "data_parallel_shard"])
def test_replicas_and_shards_of_stages(axis, schedule):
    check_training({"pipeline_parallel": 2, axis: 2}, schedule, accumulate=2, microbatches=2)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "interleaved"])
def test_stages_whose_layers_are_split(schedule):
    plan = {"model.*.inner.0": "colwise_gather", "head": "rowwise_split"}
    mesh = {"pipeline_parallel": 2, "tensor_parallel": 2}
    check_training(mesh, schedule, accumulate=2, microbatches=2, parallelize=plan)


@pytest.mark.world_size(2)
def test_different_batches_within_a_pipeline_are_refused():
    trainer = build_trainer({"pipeline_parallel": 2}, strategy_options={"pipeline_module": "model"})
    samples = make_samples(BATCH, seed=dist.get_rank())
    with pytest.raises(RuntimeError, match="pipeline peers must read the same samples"):
        trainer.fit(seeded(Stack), rank_loader(samples, BATCH, 0, 1))


@pytest.mark.world_size(2)
def test_a_module_that_was_cut_stays_in_its_pipeline():
    trainer, module = check_training({"pipeline_parallel": 2}, "1f1b", microbatches=2)
    trainer.fit(module, rank_loader(make_samples(BATCH), BATCH, 0, 1))  # again, as it was cut
    for mesh, schedule in (({"data_parallel_replicate": 2}, "1f1b"), ({"pipeline_parallel": 2}, "interleaved")):
        other = build_trainer(mesh, strategy_options={"pipeline_module": "model", "schedule": schedule})
        with pytest.raises(RuntimeError, match="was cut into pipeline stages by an earlier Trainer"):
            other.fit(module, rank_loader(make_samples(BATCH), BATCH, 0, 1))
