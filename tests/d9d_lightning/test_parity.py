"""Training on a mesh equals training on one process: against a loop in plain torch."""

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

NUM_STEPS = 20
BATCH = 8
CLIP = 0.3

# fp32 sums in another order; fp64 leaves only what AdamW's division makes of the last bits.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def plain_training(dtype, accumulate):
    """Losses per batch and final weights of one process, by a loop of plain torch."""
    module = seeded(Regression, dtype=dtype)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    x, y = make_samples(NUM_STEPS * accumulate * BATCH, dtype=dtype)
    losses = []
    for start in range(0, len(x), BATCH):
        loss = F.mse_loss(module(x[start : start + BATCH]), y[start : start + BATCH])
        losses.append(loss.detach())
        (loss / accumulate).backward()
        if len(losses) % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses), module.state_dict()


def check_training(mesh, dtype, accumulate):
    trainer = build_trainer(mesh, accumulate_grad_batches=accumulate, gradient_clip_val=CLIP)
    module = seeded(Regression, dtype=dtype)
    samples = make_samples(NUM_STEPS * accumulate * BATCH, dtype=dtype)
    trainer.fit(module, rank_loader(samples, BATCH, dist.get_rank(), dist.get_world_size()))
    losses = torch.stack(module.losses)
    dist.all_reduce(losses)
    expected_losses, expected_state = plain_training(dtype, accumulate)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(losses / dist.get_world_size(), expected_losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(full_state(module), dict(expected_state), rtol=tolerance, atol=tolerance)
    assert trainer.strategy.last_grad_norm.item() > 0


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_ranks_train_like_one_process(mesh, dtype, accumulate):
    check_training(mesh, dtype, accumulate)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("mesh", MESHES[4], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_four_ranks_train_like_one_process(mesh, dtype, accumulate):
    check_training(mesh, dtype, accumulate)


@pytest.mark.world_size(1)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_one_rank_trains_like_plain_torch(accumulate):
    check_training({}, torch.float64, accumulate)
