"""Ranks without a batch where others have some end with an error on all of them, or are left out where nobody waits."""

import pytest
import torch
import torch.distributed as dist

from tests.d9d_lightning.support import Regression, build_trainer, make_samples, rank_loader, seeded


class Evaluates(Regression):
    def validation_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


class AllowsEmpty(Evaluates):
    """Lightning skips the loop of a rank without batches, where the module allows them."""

    def __init__(self):
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True


def one_batch_on_rank_0():
    return rank_loader(make_samples(4 if dist.get_rank() == 0 else 0), 4, 0, 1)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("module", [Evaluates, AllowsEmpty])
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}], ids=str)
@pytest.mark.parametrize("act", ["fit", "validate", "test"])
def test_loops_that_wait_for_each_other(act, mesh, module):
    trainer = build_trainer(mesh)
    run = {"fit": trainer.fit, "validate": trainer.validate, "test": trainer.test}[act]
    with pytest.raises(RuntimeError, match=r"DataLoader has no batch on 1 of 2 data-parallel ranks"):
        run(seeded(module), one_batch_on_rank_0())


@pytest.mark.world_size(2)
def test_predictions_of_shards():
    trainer = build_trainer({"data_parallel_shard": 2})
    with pytest.raises(RuntimeError, match=r"no batch on 1 of 2 .* Give each rank a sample"):
        trainer.predict(seeded(AllowsEmpty), one_batch_on_rank_0())


@pytest.mark.world_size(2)
def test_replicas_predict_without_each_other():
    module = seeded(AllowsEmpty)
    predictions = build_trainer({"data_parallel_replicate": 2}).predict(module, one_batch_on_rank_0())
    if dist.get_rank() == 0:
        torch.testing.assert_close(predictions, [seeded(AllowsEmpty)(make_samples(4)[0]).detach()])
    else:
        assert not predictions
