"""Losses that layers add, under Lightning: the same weights as with these terms in the loss of the step."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from d9d.core.side_loss import attach_side_loss
from tests.d9d_lightning.support import build_trainer
from tests.harness.parity import FP64_EXACT, assert_close_tree, named_full_parameters

COEFFICIENT = 0.3


class Module(L.LightningModule):
    def __init__(self, *, attaches: bool, returns: str = "loss") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()
        self.attaches, self.returns = attaches, returns

    def training_step(self, batch, batch_idx):
        hidden = torch.tanh(self.up(batch))
        term = COEFFICIENT * hidden.square().mean()
        if self.attaches:
            hidden = attach_side_loss(hidden, term)
        loss = self.down(hidden).square().mean() + (0.0 if self.attaches else term)
        if self.returns == "weighted":
            return {"loss": loss, "loss_weight": torch.tensor(1.0 + batch_idx)}
        return loss if self.returns == "loss" else {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("returns", ["loss", "mapping", "weighted"])
@pytest.mark.parametrize(
    ("mesh", "microbatches"), [({"data_parallel_replicate": 2}, None), ({"data_parallel_shard": 2}, 2)], ids=str
)
def test_counts_like_the_loss(returns: str, mesh: dict[str, int], microbatches: int | None):
    trained = []
    for attaches in (True, False):
        module = Module(attaches=attaches, returns=returns)
        data = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        trainer = build_trainer(
            mesh,
            strategy_options={"microbatches": microbatches},
            use_distributed_sampler=True,
            accumulate_grad_batches=2,
            gradient_clip_val=0.1,
        )
        trainer.fit(module, DataLoader(data, batch_size=2))
        assert trainer.global_step == 2
        trained.append(named_full_parameters(module))
    assert_close_tree(trained[0], trained[1], rtol=0, atol=FP64_EXACT)
