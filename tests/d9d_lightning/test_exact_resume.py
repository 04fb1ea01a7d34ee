"""D5 in Lightning: a run that is interrupted three times is the run that is not, bit for bit, on two ranks."""

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import Dataset

from d9d_lightning.data import elastic_dataloader
from tests.d9d_lightning.support import NUM_FEATURES, Block, Regression, build_trainer, full_state, make_samples, seeded

NUM_SAMPLES, GLOBAL_BATCH_SIZE, ACCUMULATED = 40, 6, 3  # 6 steps in an epoch; of each a rank reads 3 batches of 1
NUM_STEPS = 12
ENDS = (3, 6, 10, NUM_STEPS)
"""Steps after which a run ends: in an epoch, at its end, and in the next one."""


class Numbered(Dataset):
    def __init__(self):
        self.x, self.y = make_samples(NUM_SAMPLES)

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


class Dropped(Regression):
    """Random in each forward pass, with a learning rate and metrics that change in each step."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(Block(NUM_FEATURES), nn.Dropout(0.3)) for _ in range(2)])

    def training_step(self, batch, batch_idx):
        x, y, _ = batch
        loss = F.mse_loss(self(x), y)
        self.log("loss", loss, sync_dist=True)
        self.log("own", loss * batch_idx)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Notes(Callback):
    """What a run was like on this rank: for each batch its samples, and what is known behind it."""

    def __init__(self):
        self.batches = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        norm = trainer.strategy.last_grad_norm
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        random = torch.random.get_rng_state().sum().item()
        loss = outputs["loss"].item()
        # Within a window it is that of the step before, which a new process does not have.
        known = None if trainer.fit_loop._should_accumulate() else norm.item()
        self.batches.append((trainer.global_step, batch_idx, batch[2].tolist(), loss, known, rates, random))


class Kept(Logger):
    """Keeps metrics as a logger gets them."""

    def __init__(self):
        super().__init__()
        self.metrics = []

    name, version = "kept", 0

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, dict(metrics)))


def run(mesh, folder, *, end, resumed=None):
    """Train to a step, after which a checkpoint is written."""
    notes, logger = Notes(), Kept()
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=end, save_top_k=-1, save_on_train_epoch_end=False)
    trainer = build_trainer(
        mesh,
        max_epochs=-1,
        max_steps=end,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        logger=logger,
        callbacks=[notes, saving],
        enable_checkpointing=True,
    )
    module = seeded(Dropped)
    loader = elastic_dataloader(Numbered(), global_batch_size=GLOBAL_BATCH_SIZE, batch_size=1)
    if resumed is not None:
        torch.rand(end)  # a process that begins elsewhere
    trainer.fit(module, loader, ckpt_path=None if resumed is None else folder / f"step={resumed}.ckpt")
    return notes.batches, logger.metrics, full_state(module)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}], ids=str)
def test_three_resumes_change_nothing(mesh, tmp_path):
    batches, metrics, state = run(mesh, tmp_path / "whole", end=NUM_STEPS)
    assert len(batches) == NUM_STEPS * ACCUMULATED
    assert len({samples[0] for _, _, samples, *_ in batches[: 6 * ACCUMULATED]}) == 6 * ACCUMULATED
    resumed_batches, resumed_metrics, resumed_state, begin = [], [], {}, None
    for end in ENDS:
        more_batches, more_metrics, resumed_state = run(mesh, tmp_path / "parts", end=end, resumed=begin)
        resumed_batches += more_batches
        resumed_metrics += more_metrics
        begin = end
    assert resumed_batches == batches
    assert resumed_metrics == metrics
    assert all(torch.equal(value, state[name]) for name, value in resumed_state.items())
