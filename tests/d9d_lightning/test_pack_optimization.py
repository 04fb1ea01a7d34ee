"""A batch that is cut into microbatches trains as the whole batch, with the hooks and values of Lightning."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.d9d_lightning.support import (
    MESHES,
    Regression,
    build_trainer,
    full_state,
    make_samples,
    rank_loader,
    seeded,
)

BATCH = 14
NUM_STEPS = 3
# fp64: sums in another order, and what AdamW's division makes of the last bits.
TOLERANCE = 1e-12


class Logging(Regression):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "predictions": self(batch[0]).detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.calls.append(("end", len(batch[0]), tuple(outputs["predictions"].shape)))


def plain_training(accumulate):
    module = seeded(Regression)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    x, y = make_samples(NUM_STEPS * accumulate * BATCH)
    losses = []
    for start in range(0, len(x), BATCH):
        loss = F.mse_loss(module(x[start : start + BATCH]), y[start : start + BATCH])
        losses.append(loss.detach())
        (loss / accumulate).backward()
        if len(losses) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses), module.state_dict()


def check_split(mesh, accumulate):
    """Seven samples per rank in four microbatches: 2, 2, 2 and 1."""
    trainer = build_trainer(mesh, accumulate_grad_batches=accumulate, strategy_options={"microbatches": 4})
    module = seeded(Logging)
    world = dist.get_world_size()
    samples = make_samples(NUM_STEPS * accumulate * BATCH)
    trainer.fit(module, rank_loader(samples, BATCH, dist.get_rank(), world))
    losses, state = plain_training(accumulate)
    torch.testing.assert_close(full_state(module), dict(state), rtol=TOLERANCE, atol=TOLERANCE)
    epoch = trainer.callback_metrics["loss_epoch"].clone()
    dist.all_reduce(epoch)
    torch.testing.assert_close(epoch.double() / world, losses.mean(), rtol=1e-6, atol=0)
    assert [call for call in module.calls if type(call) is tuple] == [("end", BATCH // world, (BATCH // world,))] * (
        NUM_STEPS * accumulate
    )
    assert module.calls.count("on_after_backward") == 4 * NUM_STEPS * accumulate
    assert trainer.global_step == NUM_STEPS


@pytest.mark.world_size(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_rank_with_microbatches_trains_like_plain_torch(accumulate):
    check_split({}, accumulate)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_ranks_with_microbatches_train_like_one_process(mesh, accumulate):
    check_split(mesh, accumulate)


class Unsized(torch.utils.data.IterableDataset):
    def __init__(self, tensors):
        self.tensors = tensors

    def __iter__(self):
        return iter(zip(*self.tensors, strict=True))


@pytest.mark.world_size(1)
@pytest.mark.parametrize("has_length", [True, False])
def test_a_short_last_window_is_a_mean_over_its_batches(has_length):
    """Five batches in windows of 3: the second window has two."""
    x, y = make_samples(5 * BATCH)
    module = seeded(Regression)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    for window in (range(3), range(3, 5)):
        for index in window:
            rows = slice(index * BATCH, (index + 1) * BATCH)
            (F.mse_loss(module(x[rows]), y[rows]) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = seeded(Regression)
    data = torch.utils.data.TensorDataset(x, y) if has_length else Unsized((x, y))
    trainer = build_trainer({}, accumulate_grad_batches=3)
    trainer.fit(trained, torch.utils.data.DataLoader(data, batch_size=BATCH))
    torch.testing.assert_close(trained.state_dict(), module.state_dict(), rtol=TOLERANCE, atol=TOLERANCE)
    assert trainer.global_step == 2
