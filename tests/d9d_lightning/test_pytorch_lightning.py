"""`import pytorch_lightning as pl`: its Trainers and modules have a strategy of their own."""

import sys

import lightning as L
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_fabric.plugins.environments import ClusterEnvironment
from pytorch_lightning.utilities import grad_norm as pl_grad_norm
from torch import nn

import d9d_lightning
import d9d_lightning.callbacks
from d9d_lightning.pytorch_lightning import (
    D9DStrategy,
    EMAWeightAveraging,
    GradientNormLogger,
    PipelineStages,
    grad_norm,
    measure_layer_costs,
    register,
    sync_over,
)
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


class NormModule(Module):
    def __init__(self, measure):
        super().__init__()
        self.measure = measure
        self.norms = []

    def on_before_optimizer_step(self, optimizer):
        self.norms.append({name: norm.item() for name, norm in self.measure(self, 2).items()})


@pytest.mark.world_size(2)
def test_stages_of_pytorch_lightning():
    def fit(measure, callbacks, **options):
        module = seeded(lambda: NormModule(measure))
        trainer = build_pl_trainer(gradient_clip_val=0.1, callbacks=callbacks, **options)
        trainer.fit(module, rank_loader(make_samples(16), 8, 0, 1))
        return module, trainer.callback_metrics

    expected, expected_logs = fit(pl_grad_norm, [pl.callbacks.EMAWeightAveraging(decay=0.9)], devices=1)
    stages = PipelineStages(layers=["*"])
    strategy = D9DStrategy({"pipeline_parallel": 2}, pipeline_module="layers", stages=stages, microbatches=2)
    callbacks = [GradientNormLogger(), EMAWeightAveraging(0.9)]
    module, logs = fit(grad_norm, callbacks, strategy=strategy, devices=2, plugins=[build_environment()])
    hosted = full_state(module)
    assert set(hosted) == {f"layers.{2 * dist.get_rank()}.{name}" for name in ("weight", "bias")}
    torch.testing.assert_close(hosted, {name: expected.state_dict()[name] for name in hosted}, **EXACT)
    assert logs["loss"].item() == pytest.approx(expected_logs["loss"].item())
    for norms, expected_norms in zip(module.norms, expected.norms, strict=True):
        assert norms == pytest.approx(expected_norms)
    assert logs["grad_norm"].item() == pytest.approx(expected.norms[-1]["grad_2.0_norm_total"])


def test_no_module_has_the_names_of_the_other_lightning():
    prefix = "d9d_lightning.pytorch_lightning."
    modules = {name: module for name, module in sys.modules.items() if name.startswith(prefix)}
    assert f"{prefix}pipeline.stages" in modules
    assert {type(module.__loader__).__name__ for module in modules.values()} == {"_RenamingLoader"}
    others = ("lightning.pytorch", "lightning.fabric")
    assert not [
        (name, key)
        for name, module in modules.items()
        for key, value in vars(module).items()
        if isinstance(value, type) and value.__module__.startswith(others)
    ]


def test_public_names():
    for value in (EMAWeightAveraging, GradientNormLogger):
        assert issubclass(value, pl.Callback)
    for value in (measure_layer_costs, sync_over, grad_norm, register, D9DStrategy, PipelineStages):
        assert value.__module__.startswith("d9d_lightning.pytorch_lightning.")


def test_names():
    assert isinstance(build_pl_trainer(strategy="d9d_fsdp", devices=2).strategy, D9DStrategy)
    name = register("tp2_mb4")
    assert build_pl_trainer(strategy=name, devices=2).strategy.mesh.tensor_parallel == 2


def test_the_other_strategy_says_what_to_take():
    takes = (
        r"for lightning\.pytorch\.Trainer; not for Fabric, and pytorch_lightning takes that of d9d_lightning\.pytorch"
    )
    for build in (build_pl_trainer, L.Fabric):
        with pytest.raises(ValueError, match=takes):
            build(strategy=d9d_lightning.D9DStrategy(), devices=2)
    with pytest.raises(ValueError, match=r"D9DStrategy \(for pytorch_lightning\.Trainer; not for Fabric\)"):
        L.Trainer(strategy=D9DStrategy(), devices=2)


def test_the_other_callback_says_what_to_take():
    trainer = build_pl_trainer(strategy=D9DStrategy(), devices=2)
    other = r"d9d_lightning\.strategy\.D9DStrategy, not with d9d_lightning\.pytorch_lightning\.strategy\.D9DStrategy"
    with pytest.raises(ValueError, match=other):
        d9d_lightning.callbacks.GradientNormLogger().setup(trainer, seeded(Module), "fit")
