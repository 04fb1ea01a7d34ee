"""Ranks without a batch where others have some end with an error on all of them, or are left out where nobody waits; loader processes."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from d9d_lightning import D9DStrategy
from tests.d9d_lightning.support import Regression, build_trainer, make_samples, plain_trainer, rank_loader, seeded


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


class Groups(Dataset):
    """Tells of each sample whether its process leads a process group, and what `note_worker` has noted there."""

    noted = -1

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.tensor([os.getpgid(0) == os.getpid(), Groups.noted])


def note_worker(worker_id):
    Groups.noted = worker_id


class Keeps(Regression):
    def __init__(self):
        super().__init__()
        self.kept = []

    def training_step(self, batch, batch_idx):
        self.kept += batch.tolist()
        return sum(weight.sum() for weight in self.parameters())


@pytest.mark.parametrize(("init", "noted"), [(None, -1), (note_worker, 0)], ids=["ours-only", "with-users"])
def test_loader_processes_have_a_process_group_of_their_own(init, noted):
    loader = DataLoader(Groups(), num_workers=1, worker_init_fn=init)
    for _ in range(2):
        module = Keeps()
        plain_trainer(strategy=D9DStrategy()).fit(module, loader)
        assert module.kept == [[True, noted]] * 2
    assert loader.worker_init_fn.then is init
