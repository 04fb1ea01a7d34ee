"""A callback that ends a fit at a loss spike, and the next fit in the same process, which goes back to a checkpoint."""

import statistics
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests.d9d_lightning.support import Regression, build_trainer, full_state, make_samples, rank_loader, seeded

NUM_BATCHES = 4
SPIKE_STEP = 6


class SpikeError(RuntimeError):
    pass


class EndsAtSpikes(Callback):
    """As in docs/lightning.md."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        loss = float(trainer.strategy.reduce(outputs["loss"]))  # the same on all ranks
        if len(self.losses) >= 4 and loss > 10 * statistics.median(self.losses):
            raise SpikeError(f"step {trainer.global_step}: the loss is {loss}")
        self.losses.append(loss)


class Spiking(Regression):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1e6 if self.global_step + 1 == SPIKE_STEP else 1)


def trainer_for(mesh, folder):
    callbacks = [EndsAtSpikes(), ModelCheckpoint(folder, save_last=True)]
    return build_trainer(mesh, callbacks=callbacks, enable_checkpointing=True, max_epochs=3)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}], ids=str)
def test_a_fit_goes_back_to_before_a_spike(mesh, tmp_path: Path):
    loader = rank_loader(make_samples(4 * NUM_BATCHES), 4, dist.get_rank(), 2)
    with pytest.raises(SpikeError, match=f"step {SPIKE_STEP}"):
        trainer_for(mesh, tmp_path / "saved").fit(seeded(Spiking), loader, ckpt_path="last")
    module = seeded(Regression, seed=5)
    trainer = trainer_for(mesh, tmp_path / "saved")
    trainer.fit(module, loader, ckpt_path="last")
    assert len(module.losses) == 2 * NUM_BATCHES  # from the end of the first epoch on
    straight = seeded(Regression)
    trainer_for(mesh, tmp_path / "straight").fit(straight, loader)
    for name, value in full_state(straight).items():
        assert torch.equal(full_state(module)[name], value)
