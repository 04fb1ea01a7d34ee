"""Lightning's callbacks that unfreeze a backbone train as on one process, and go on behind a checkpoint as without it."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import nn

from d9d_lightning import D9DStrategy, read_checkpoint
from tests.d9d_lightning.support import (
    NUM_FEATURES,
    Block,
    build_trainer,
    make_samples,
    plain_trainer,
    rank_loader,
    seeded,
)
from tests.d9d_lightning.test_pipeline_parity import WIDTH

NUM_EPOCHS = 4
UNFREEZES = 1
TOLERANCE = {"rtol": 1e-11, "atol": 1e-11}
MESHES = {
    "replicate": {"data_parallel_replicate": 2},
    "shard": {"data_parallel_shard": 2},
    "pipeline": {"pipeline_parallel": 2},
}


class Transfer(L.LightningModule):
    """A backbone, frozen at first, and a head whose optimizer does not know it."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), *[Block(WIDTH) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 1)
        self.losses = []
        self.rates = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.head(self.backbone(x)).squeeze(-1), y)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *args):
        self.losses.append(float(self.trainer.callback_metrics["loss_step"]))
        self.rates.append([group["lr"] for group in self.optimizers().param_groups])

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


class LastBlocks(BaseFinetuning):
    """Unfreezes one block of the second stage, and later one of the first."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch in (1, 2):
            block = pl_module.backbone[3 if epoch == 1 else 1]
            self.unfreeze_and_add_param_group(block, optimizer, lr=epoch * 1e-3)


class OwnGroups(LastBlocks):
    """The same without Lightning's comparison of all parameters, which torch refuses between shards and plain tensors."""

    @classmethod
    def unfreeze_and_add_param_group(cls, modules, optimizer, lr):
        cls.make_trainable(modules)
        optimizer.add_param_group({"params": list(modules.parameters()), "lr": lr})


class WholeBackbone(LastBlocks):
    """Unfreezes what the optimizer has from the start."""

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.make_trainable(pl_module.backbone)


class AllKnown(Transfer):
    """Its optimizer has all parameters, frozen ones too."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class Token(nn.Module):
    """Has a parameter of its own, beside layers that stay frozen."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(NUM_FEATURES))
        self.norm = nn.BatchNorm1d(NUM_FEATURES)
        self.layer = nn.Linear(NUM_FEATURES, WIDTH)

    def forward(self, x):
        return self.layer(self.norm(x + self.token))


class TokenTransfer(Transfer):
    def __init__(self):
        super().__init__()
        self.backbone = Token()


class TokenAlone(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            pl_module.backbone.token.requires_grad = True
            optimizer.add_param_group({"params": [pl_module.backbone.token], "lr": 1e-3})


class TwoGroups(LastBlocks):
    """Unfreezes a block of each stage in one epoch, at different rates."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.epoch:
            for number, rate in ((1, 1e-3), (3, 5e-4)):
                self.unfreeze_and_add_param_group(pl_module.backbone[number], optimizer, lr=rate)


class GroupAtEnd(LastBlocks):
    """Adds a group of one stage where no step comes before the save."""

    def finetune_function(self, pl_module, epoch, optimizer):
        pass

    def on_train_end(self, trainer, pl_module):
        self.unfreeze_and_add_param_group(pl_module.backbone[3], trainer.optimizers[0], lr=1e-3)


CALLBACKS = {
    "two at first": lambda: TwoGroups(0),
    "two later": lambda: TwoGroups(1),
    "at the end": GroupAtEnd,
    "whole": WholeBackbone,
    "backbone": lambda: BackboneFinetuning(UNFREEZES, lambda_func=lambda epoch: 1.5, should_align=False),
    "blocks": LastBlocks,
    "own": OwnGroups,
}


def fit(trainer, *, resume=None, kind=Transfer):
    module = seeded(kind)
    options = trainer.strategy.distributed_sampler_kwargs if dist.is_initialized() else {"rank": 0, "num_replicas": 1}
    loader = rank_loader(make_samples(16), 8, options["rank"], options["num_replicas"])
    trainer.fit(module, loader, ckpt_path=resume)
    return module


def trainer_of(mesh, callback, num_epochs, **options):
    options |= {"callbacks": [CALLBACKS[callback]()], "max_epochs": num_epochs}
    if mesh is None:
        return plain_trainer(**options)
    pipeline = {"pipeline_module": "backbone", "microbatches": 2} if "pipeline_parallel" in mesh else {}
    return build_trainer(mesh, strategy_options=pipeline, **options)


def check(mesh, callback, tmp_path):
    one = seeded(Transfer)
    trainer_of(None, callback, NUM_EPOCHS).fit(one, rank_loader(make_samples(16), 8, 0, 1))
    trainer = trainer_of(mesh, callback, NUM_EPOCHS)
    whole = fit(trainer)
    assert whole.losses == pytest.approx(one.losses, rel=1e-11)
    assert whole.rates == one.rates
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    saved = read_checkpoint(tmp_path / "whole.ckpt")
    torch.testing.assert_close(saved["state_dict"], one.state_dict(), **TOLERANCE)
    assert [len(group["params"]) for group in saved["optimizer_states"][0]["param_groups"]] == [
        len(group["params"]) for group in one.optimizers().param_groups
    ]
    for num_epochs in (UNFREEZES, UNFREEZES + 1):
        half = trainer_of(mesh, callback, num_epochs)
        fit(half)
        half.save_checkpoint(tmp_path / "half.ckpt")
        resumed = trainer_of(mesh, callback, NUM_EPOCHS)
        module = fit(resumed, resume=tmp_path / "half.ckpt")
        assert module.losses == whole.losses[2 * num_epochs :]
        assert module.rates == whole.rates[2 * num_epochs :]
        resumed.save_checkpoint(tmp_path / "resumed.ckpt")
        again = read_checkpoint(tmp_path / "resumed.ckpt")
        torch.testing.assert_close(again["state_dict"], saved["state_dict"], rtol=0, atol=0)
        torch.testing.assert_close(
            again["optimizer_states"][0]["state"], saved["optimizer_states"][0]["state"], rtol=0, atol=0
        )


@pytest.mark.world_size(2)
@pytest.mark.parametrize("callback", ["backbone", "blocks"])
@pytest.mark.parametrize("mesh", MESHES)
def test_unfreezing_and_resuming_behind_it(mesh, callback, tmp_path):
    check(MESHES[mesh], callback, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.world_size(4)
@pytest.mark.parametrize("axis", ["data_parallel_replicate", "pipeline_parallel"])
def test_shards_on_two_axes(axis, tmp_path):
    check({axis: 2, "data_parallel_shard": 2}, "own", tmp_path)


def test_one_process_goes_on_with_what_was_unfrozen(tmp_path):
    """Also from a file of plain Lightning, which itself leaves it frozen then."""
    strategy = {"strategy": D9DStrategy(), "callbacks": [CALLBACKS["blocks"]()]}
    losses = []
    for num_epochs, options, resume in (
        (NUM_EPOCHS, {"callbacks": [CALLBACKS["blocks"]()]}, None),
        (2, {"callbacks": [CALLBACKS["blocks"]()]}, None),
        (NUM_EPOCHS, strategy, tmp_path / "half.ckpt"),
    ):
        module = seeded(Transfer)
        trainer = plain_trainer(max_epochs=num_epochs, **options)
        trainer.fit(module, rank_loader(make_samples(16), 8, 0, 1), ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        losses.append(module.losses)
    whole, _, resumed = losses
    assert resumed == whole[4:]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_what_the_optimizer_knows_from_the_start_goes_on_unfrozen(mesh, tmp_path):
    losses, states = [], []
    for number, (num_epochs, resume) in enumerate(((3, None), (2, None), (3, tmp_path / "1.ckpt"))):
        trainer = trainer_of(MESHES[mesh], "whole", num_epochs)
        module = fit(trainer, resume=resume, kind=AllKnown)
        assert all(parameter.requires_grad for parameter in module.parameters())
        trainer.save_checkpoint(tmp_path / f"{number}.ckpt")
        losses.append(module.losses)
        states.append(read_checkpoint(tmp_path / f"{number}.ckpt")["state_dict"])
    assert losses[2] == losses[0][4:]
    torch.testing.assert_close(states[2], states[0], rtol=0, atol=0)


@pytest.mark.parametrize("is_plain", [True, False])
def test_only_what_was_unfrozen_is(is_plain, tmp_path):
    """A group has a parameter of a module with children: those stay frozen, and so do their statistics."""
    modules = []
    for num_epochs, resume in ((3, None), (2, None), (3, tmp_path / "half.ckpt")):
        module = seeded(TokenTransfer)
        strategy = {} if is_plain and resume is None else {"strategy": D9DStrategy()}
        trainer = plain_trainer(max_epochs=num_epochs, callbacks=[TokenAlone()], **strategy)
        trainer.fit(module, rank_loader(make_samples(16), 8, 0, 1), ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / "half.ckpt")
        modules.append(module)
    whole, _, resumed = modules
    assert resumed.losses == whole.losses[4:]
    trained = {name for name, parameter in resumed.named_parameters() if parameter.requires_grad}
    assert trained == {"backbone.token", "head.weight", "head.bias"}
    assert not resumed.backbone.norm.track_running_stats


@pytest.mark.world_size(2)
@pytest.mark.parametrize("when", ["at first", "later"])
def test_stages_add_one_group_per_epoch(when):
    with pytest.raises(ValueError, match=r"one group per epoch(.|\n)*optimizer 0, group 1: lr is 0.001, 0.0005"):
        fit(trainer_of(MESHES["pipeline"], f"two {when}", 2))


@pytest.mark.world_size(2)
def test_a_save_with_a_group_on_one_stage_alone_fails_on_all(tmp_path):
    trainer = trainer_of(MESHES["pipeline"], "at the end", 1)
    fit(trainer)
    with pytest.raises(ValueError, match=r"\[\[1\], \[2\]\] groups by pipeline rank"):
        trainer.save_checkpoint(tmp_path / "last.ckpt")
