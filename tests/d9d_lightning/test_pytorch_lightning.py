"""`import pytorch_lightning as pl`: its Trainers and modules have a strategy of their own."""

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_fabric.plugins.environments import ClusterEnvironment
from torch import nn

import d9d_lightning
from d9d_lightning.pytorch_lightning import D9DStrategy, register
from tests.d9d_lightning.support import (
    NUM_FEATURES,
    PoolEnvironment,
    full_state,
    make_samples,
    rank_loader,
    seeded,
)

EXACT = {"rtol": 1e-12, "atol": 1e-12}


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NUM_FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.layers(batch[0]).squeeze(-1), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.mse_loss(self.layers(batch[0]).squeeze(-1), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def build_pl_trainer(**options):
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(**{**defaults, **options})


def build_environment():
    methods = {name: value for name, value in vars(PoolEnvironment).items() if not name.startswith("_")}
    return type("Environment", (ClusterEnvironment,), methods)()


@pytest.mark.world_size(2)
def test_a_module_and_a_trainer_of_pytorch_lightning(tmp_path):
    def loader(rank, world_size):
        return rank_loader(make_samples(32), 8, rank, world_size)

    expected = seeded(Module)
    reference = build_pl_trainer(devices=1)
    reference.fit(expected, loader(0, 1))
    strategy = D9DStrategy({"data_parallel_shard": 2}, min_unit_params=20)
    trainer = build_pl_trainer(strategy=strategy, devices=2, gradient_clip_val=1e3, plugins=[build_environment()])
    module = seeded(Module)
    trainer.fit(module, loader(dist.get_rank(), 2))
    torch.testing.assert_close(full_state(module), dict(expected.state_dict()), **EXACT)
    assert trainer.callback_metrics["loss"].item() == pytest.approx(reference.callback_metrics["loss"].item())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    [result] = trainer.test(module, loader(dist.get_rank(), 2), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    [expected_result] = reference.test(expected, loader(0, 1), verbose=False)
    assert result["test_loss"] == pytest.approx(expected_result["test_loss"])


def test_names():
    assert isinstance(build_pl_trainer(strategy="d9d_fsdp", devices=2).strategy, D9DStrategy)
    name = register("tp2_mb4")
    assert build_pl_trainer(strategy=name, devices=2).strategy.mesh.tensor_parallel == 2


def test_the_other_strategy_says_what_to_take():
    with pytest.raises(ValueError, match=r"pytorch_lightning takes that of the module d9d_lightning\.pytorch"):
        build_pl_trainer(strategy=d9d_lightning.D9DStrategy(), devices=2)
