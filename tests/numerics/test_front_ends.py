"""Both front ends train one model on the same batches to the same weights: they drive one engine."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Subset

from d9d.core.dist_context import DeviceMeshParameters
from d9d.internals.materialize import materialize_module
from tests.d9d.loop.run.regression_job import BASE_SEED, GLOBAL_BATCH_SIZE, Data, Model, build_job, collate
from tests.d9d_lightning.support import build_trainer
from tests.harness.parity import FP64_EXACT, assert_close_tree, named_full_parameters

NUM_STEPS = 20
MICROBATCH_SIZE = 2


class Module(L.LightningModule):
    """The job of `regression_job`, as a LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = Model(torch.float64, 0.0)
        materialize_module(self.model, torch.device("cpu"), BASE_SEED)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.model(batch.x, None), batch.y)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.9 * step / NUM_STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def rank_batches() -> DataLoader:
    """The microbatches that the native job gives this rank: number k of a step goes to rank k modulo the ranks."""
    starts = range(0, NUM_STEPS * GLOBAL_BATCH_SIZE, MICROBATCH_SIZE)
    own = [start for number, start in enumerate(starts) if number % dist.get_world_size() == dist.get_rank()]
    index = [start + offset for start in own for offset in range(MICROBATCH_SIZE)]
    data = Data(GLOBAL_BATCH_SIZE * 30, torch.float64)
    return DataLoader(Subset(data, index), batch_size=MICROBATCH_SIZE, collate_fn=collate)


def check_front_ends(tmp_path, degrees: dict[str, int]) -> None:
    job = build_job(DeviceMeshParameters(**degrees), tmp_path, total_steps=NUM_STEPS, microbatch_size=MICROBATCH_SIZE)
    job.trainer.train()
    accumulate = GLOBAL_BATCH_SIZE // MICROBATCH_SIZE // dist.get_world_size()
    trainer = build_trainer(degrees, accumulate_grad_batches=accumulate, gradient_clip_val=0.5)
    module = Module()
    trainer.fit(module, rank_batches())
    assert trainer.global_step == NUM_STEPS
    native, lightning = named_full_parameters(job.model), named_full_parameters(module.model)
    assert_close_tree(lightning, native, rtol=0, atol=FP64_EXACT)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("degrees", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}], ids=str)
def test_two_ranks(tmp_path, degrees):
    check_front_ends(tmp_path, degrees)


@pytest.mark.world_size(4)
def test_four_ranks(tmp_path):
    check_front_ends(tmp_path, {"data_parallel_replicate": 2, "data_parallel_shard": 2})
