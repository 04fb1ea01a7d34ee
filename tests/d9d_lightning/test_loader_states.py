"""Loaders with a state go on where training stopped, each rank on its own part: what is read after a resume."""

import functools

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from d9d_lightning import read_checkpoint
from tests.d9d_lightning.support import NUM_FEATURES, Regression, build_trainer, seeded

NUM_BATCHES = 5
SAVED_AT = 3


class Model(Regression):
    """Trains on numbers, and keeps them."""

    def __init__(self):
        super().__init__()
        self.read = []

    def training_step(self, batch, batch_idx):
        self.read.extend(batch.tolist())
        x = batch.double().unsqueeze(-1).expand(-1, NUM_FEATURES)
        return self(x).square().mean()


class AsksForSteps(Model):
    """Has the loaders built before Lightning reads the checkpoint."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


class Numbers(IterableDataset):
    """Tens of a rank, without a length."""

    def __init__(self, rank):
        self.first = 10 * rank

    def __iter__(self):
        return iter(range(self.first, self.first + NUM_BATCHES))


class NumbersLoader:
    """A loader of the user's own without a length."""

    def __init__(self, rank):
        self.rank = rank
        self.position = 0

    def __iter__(self):
        while self.position < NUM_BATCHES:
            self.position += 1
            yield torch.tensor([10 * self.rank + self.position - 1])
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def stateful_iterable(rank):
    return StatefulDataLoader(Numbers(rank), batch_size=1)


def stateful_map(rank, shuffle=False):
    # Lightning's sampler shuffles
    return StatefulDataLoader(list(range(NUM_BATCHES * dist.get_world_size())), batch_size=1, shuffle=shuffle)


def fit(build_loader, mesh, path, *, resumes, build=Model):
    """Train two epochs, or save in the first one and resume; return what this rank has read from there on."""
    module = seeded(build)
    saves = ModelCheckpoint(path, "saved", every_n_train_steps=SAVED_AT, save_top_k=1, save_on_train_epoch_end=False)
    torch.manual_seed(7)
    trainer = build_trainer(
        mesh,
        max_epochs=2,
        max_steps=SAVED_AT if not resumes and path else -1,
        callbacks=[saves] if path and not resumes else [],
        enable_checkpointing=bool(path and not resumes),
        use_distributed_sampler=True,
    )
    ckpt_path = path / "saved.ckpt" if resumes else None
    trainer.fit(module, build_loader(trainer.strategy.distributed_sampler_kwargs["rank"]), ckpt_path=ckpt_path)
    return module.read


def check_resume(build_loader, mesh, path, build=Model):
    expected = fit(build_loader, mesh, None, resumes=False)
    assert len(expected) == 2 * NUM_BATCHES
    assert fit(build_loader, mesh, path, resumes=False) == expected[:SAVED_AT]
    assert fit(build_loader, mesh, path, resumes=True, build=build) == expected[SAVED_AT:]


@pytest.mark.world_size(1)
@pytest.mark.parametrize("build_loader", [NumbersLoader, stateful_iterable, stateful_map])
def test_one_process(build_loader, tmp_path):
    """From a loader without a length Lightning alone loses the batch that it has read ahead."""
    check_resume(build_loader, {}, tmp_path)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("build_loader", [NumbersLoader, stateful_iterable, stateful_map])
def test_each_rank_gets_its_own_position(build_loader, tmp_path):
    check_resume(build_loader, {"data_parallel_replicate": 2}, tmp_path)


class SizedNumbersLoader(NumbersLoader):
    def __len__(self):
        return NUM_BATCHES


class Stops(Model):
    """Fails in a batch that it has read, the last one of the pass or one before."""

    fails_at = SAVED_AT

    def training_step(self, batch, batch_idx):
        if len(self.read) == self.fails_at:
            raise InterruptedError
        return super().training_step(batch, batch_idx)


class StopsInLast(Stops):
    fails_at = NUM_BATCHES - 1


@pytest.mark.world_size(2)
@pytest.mark.parametrize("build", [Stops, StopsInLast])
@pytest.mark.parametrize("build_loader", [NumbersLoader, SizedNumbersLoader, stateful_map])
def test_an_exception_loses_no_batch(build_loader, build, tmp_path):
    mesh = {"data_parallel_replicate": 2}
    expected = fit(build_loader, mesh, None, resumes=False)
    trainer = build_trainer(
        mesh,
        max_epochs=2,
        callbacks=[OnExceptionCheckpoint(tmp_path, "saved")],
        enable_checkpointing=True,
        use_distributed_sampler=True,
    )
    with pytest.raises(InterruptedError):
        trainer.fit(seeded(build), build_loader(trainer.strategy.distributed_sampler_kwargs["rank"]))
    assert fit(build_loader, mesh, tmp_path, resumes=True) == expected[build.fails_at :]


@pytest.mark.world_size(1)
def test_a_module_may_ask_for_the_number_of_steps(tmp_path):
    check_resume(stateful_map, {}, tmp_path, build=AsksForSteps)


@pytest.mark.world_size(2)
def test_an_order_that_is_drawn_anew_is_refused():
    with pytest.raises(ValueError, match=r"order of a StatefulDataLoader would be drawn anew.*shuffle=False"):
        fit(functools.partial(stateful_map, shuffle=True), {"data_parallel_replicate": 2}, None, resumes=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.mark.world_size(2)
def test_two_ranks_save(folder):
    fit(NumbersLoader, {"data_parallel_shard": 2}, folder, resumes=False)
    states = read_checkpoint(folder / "saved.ckpt")["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert states == [{"data_parallel_ranks": [{"position": SAVED_AT}] * 2}]


@pytest.mark.world_size(1)
def test_another_number_of_ranks_is_refused(folder):
    with pytest.raises(ValueError, match=r"position of a NumbersLoader on 2 data-parallel ranks, and there are 1 now"):
        fit(NumbersLoader, {}, folder, resumes=True)
