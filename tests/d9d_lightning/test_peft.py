"""LoRA, by the peft package and by ours: adapters train as on one process, and the frozen weights stay."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from d9d.peft import inject_peft_and_freeze
from d9d.peft.all import PeftStackConfig, peft_method_from_config
from tests.d9d_lightning.support import (
    NUM_FEATURES,
    Block,
    build_trainer,
    full_state,
    make_samples,
    plain_trainer,
    rank_loader,
    seeded,
)

peft = pytest.importorskip("peft")

BATCH = 8
NUM_STEPS = 3
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


class Adapted(L.LightningModule):
    """A stack of blocks whose linear layers have adapters, and a head that trains in full."""

    def __init__(self):
        super().__init__()
        base = nn.Sequential(*[Block(NUM_FEATURES) for _ in range(2)], nn.Linear(NUM_FEATURES, 1))
        config = peft.LoraConfig(r=2, target_modules=r"\d\.inner\.0", modules_to_save=["2"], init_lora_weights=False)
        self.model = peft.get_peft_model(base, config)
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.model(batch[0]).squeeze(-1), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)


class AdaptedByUs(Adapted):
    """The same layers with adapters of d9d.peft."""

    def __init__(self):
        L.LightningModule.__init__(self)
        self.model = nn.Sequential(*[Block(NUM_FEATURES) for _ in range(2)], nn.Linear(NUM_FEATURES, 1))
        lora = {"kind": "lora", "module_name_pattern": r"\d\.inner\.0", "params": {"r": 2, "alpha": 4, "dropout": 0}}
        head = {"kind": "full_tune", "module_name_pattern": "2"}
        config = PeftStackConfig.model_validate({"methods": [lora, head]})
        inject_peft_and_freeze(peft_method_from_config(config), self.model)
        self.losses = []


def trained(trainer, rank, size, kind=Adapted):
    module = seeded(kind)
    trainer.fit(module, rank_loader(make_samples(NUM_STEPS * BATCH), BATCH, rank, size))
    return full_state(module)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}], ids=str)
@pytest.mark.parametrize("microbatches", [None, 2])
def test_adapters_train_as_on_one_process(mesh, microbatches):
    trainer = build_trainer(mesh, strategy_options={"microbatches": microbatches}, gradient_clip_val=0.1)
    state = trained(trainer, dist.get_rank(), 2)
    expected = trained(plain_trainer(gradient_clip_val=0.1), 0, 1)
    torch.testing.assert_close(state, expected, **TOLERANCE)
    before = seeded(Adapted).state_dict()
    changed = {name for name, tensor in expected.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "lora_" in name or "modules_to_save" in name}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}], ids=str)
def test_our_adapters_train_as_on_one_process(mesh):
    state = trained(build_trainer(mesh, gradient_clip_val=0.1), dist.get_rank(), 2, AdaptedByUs)
    expected = trained(plain_trainer(gradient_clip_val=0.1), 0, 1, AdaptedByUs)
    torch.testing.assert_close(state, expected, **TOLERANCE)
    before = seeded(AdaptedByUs).state_dict()
    changed = {name for name, tensor in expected.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if "lora_" in name or name.startswith("model.2.")}


@pytest.mark.world_size(2)
def test_adapters_of_stages_train_as_on_one_process():
    trainer = build_trainer(
        {"pipeline_parallel": 2},
        strategy_options={"pipeline_module": "model.base_model.model", "microbatches": 2},
    )
    state = trained(trainer, 0, 1)
    expected = trained(plain_trainer(), 0, 1)
    # A rank has the names of its stages.
    assert any("lora_B" in name for name in state)
    torch.testing.assert_close(state, {name: expected[name] for name in state}, **TOLERANCE)
