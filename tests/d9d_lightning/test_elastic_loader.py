"""Steps of a Trainer hold the same samples on any mesh, and a run resumes anywhere: against one process."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import nn
from torch.utils.data import Dataset

from d9d.dataset.lanes import LoaderOptions, StepRange
from d9d_lightning import D9DStrategy, read_checkpoint
from d9d_lightning.data import D9DDataModule, elastic_dataloader
from tests.d9d_lightning.support import (
    NUM_FEATURES,
    Block,
    Regression,
    build_trainer,
    full_state,
    make_samples,
    plain_trainer,
    seeded,
)

N, G, B = 20, 8, 2  # samples, samples of a step, samples of a batch: 2 steps in an epoch, 4 batches in a step
NUM_EPOCHS = 3
PARITY = {"rtol": 1e-11, "atol": 1e-11}
"""fp64: sums over ranks and batches are ordered differently."""


class Numbered(Dataset):
    """Samples that carry their index."""

    def __init__(self, num_samples=N):
        self.x, self.y = make_samples(num_samples)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


class Reads(Callback):
    """Notes the samples of each batch that is trained on, under its step."""

    def __init__(self):
        self.batches = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.batches.append((trainer.global_step, batch[2].tolist()))


class Model(Regression):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[:2], batch_idx)


class Stack(Model):
    """The same with a part that can be cut into stages."""

    def __init__(self):
        super().__init__()
        self.blocks = None
        self.model = nn.Sequential(*[Block(NUM_FEATURES) for _ in range(2)])

    def forward(self, x):
        return self.head(self.model(x)).squeeze(-1)

    def on_before_optimizer_step(self, optimizer):
        pass


def steps_of_all_ranks(reads, strategy=None):
    """Return the samples of each step over all data-parallel ranks, in their order, from the notes of each rank."""
    notes = {0: reads.batches}
    if strategy is not None and strategy.mesh.world_size > 1:
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (strategy.distributed_sampler_kwargs["rank"], reads.batches))
        notes = {}
        for rank, batches in everywhere:
            assert notes.setdefault(rank, batches) == batches, "peers have read other samples"
    steps = {}
    for _, batches in sorted(notes.items()):
        for step, group in itertools.groupby(batches, key=lambda each: each[0]):
            steps.setdefault(step, []).extend(sample for _, batch in group for sample in batch)
    return steps


def run(trainer, loader_options=None, *, build=Model, ckpt_path=None):
    reads = next(each for each in trainer.callbacks if isinstance(each, Reads))
    module = seeded(build)
    loader = elastic_dataloader(Numbered(), global_batch_size=G, **{"batch_size": B, **(loader_options or {})})
    strategy = trainer.strategy if isinstance(trainer.strategy, D9DStrategy) else None
    if strategy is None:
        loader.join(None, 1, 0)  # a process of the pool is one of several
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return steps_of_all_ranks(reads, strategy), module


def on_mesh(mesh, loader_options=None, *, build=Model, strategy_options=None, ckpt_path=None, callbacks=(), **options):
    trainer = build_trainer(
        mesh,
        strategy_options=strategy_options,
        **{"max_epochs": NUM_EPOCHS, "callbacks": [Reads(), *callbacks], **options},
    )
    return run(trainer, loader_options, build=build, ckpt_path=ckpt_path)


def on_one_process(loader_options, max_epochs=NUM_EPOCHS):
    """Train in plain Lightning."""
    trainer = plain_trainer(max_epochs=max_epochs, callbacks=[Reads()], accumulate_grad_batches=G // B)
    return run(trainer, loader_options)


@functools.cache
def reference():
    """The whole run on one process, without interruption."""
    return on_one_process({})


# ---- what the steps hold -------------------------------------------------------------------------------------------


def test_order_of_the_dataset():
    steps, _ = on_one_process({"shuffle": False})
    assert steps == {step: list(range(step % 2 * G, (step % 2 + 1) * G)) for step in range(2 * NUM_EPOCHS)}


def test_wrapped_epochs_leave_nothing_out():
    steps, _ = on_one_process({"shuffle": False, "tail": "wrap"}, 5)
    assert list(itertools.chain(*steps.values())) == [position % N for position in range(5 * 2 * G)]


def test_shuffled_epochs_differ_and_hold_each_sample_once():
    steps, _ = reference()
    epochs = [steps[step] + steps[step + 1] for step in range(0, 2 * NUM_EPOCHS, 2)]
    assert all(len(set(epoch)) == 2 * G for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == NUM_EPOCHS


def test_steps_are_jumped_over():
    steps, _ = on_one_process({"shuffle": False, "skip_steps": [StepRange(1, 3)]}, 1)
    assert steps == {0: list(range(G)), 1: list(range(G, 2 * G))}  # that of the second epoch
    data = D9DDataModule(Numbered(), global_batch_size=G, shuffle=False, skip_steps=[StepRange(1, 3)])
    loader = data.train_dataloader()
    loader.join(None, 1, 0)
    assert [batch[2].tolist() for batch in loader] == list(steps.values())


def test_loader_processes_go_on_over_the_ends_of_epochs():
    assert on_one_process({"loading": LoaderOptions(num_workers=1)})[0] == reference()[0]


@pytest.mark.world_size(4)
@pytest.mark.parametrize("is_persistent", [False, True])
def test_loader_processes_of_several_ranks(is_persistent):
    """They are forked while the threads of process groups run."""
    loading = LoaderOptions(num_workers=1, persistent_workers=is_persistent)
    steps, _ = on_mesh({"data_parallel_shard": 4}, {"loading": loading}, accumulate_grad_batches=1)
    assert steps == reference()[0]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("has_one_batch_per_step", [True, False])
def test_two_ranks_train_as_one(has_one_batch_per_step):
    mesh = {"data_parallel_shard": 2}
    options = {"batch_size": None} if has_one_batch_per_step else {}
    steps, module = on_mesh(mesh, options, accumulate_grad_batches=1 if has_one_batch_per_step else 2)
    expected, plain = reference()
    assert steps == expected
    torch.testing.assert_close(full_state(module), dict(plain.state_dict()), **PARITY)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("batch_size", "accumulate", "microbatches"), [(B, 4, None), (None, 1, 4), (4, 2, 2)])
def test_pipelines(batch_size, accumulate, microbatches):
    steps, _ = on_mesh(
        {"pipeline_parallel": 2},
        {"batch_size": batch_size},
        build=Stack,
        strategy_options={"pipeline_module": "model", "microbatches": microbatches},
        accumulate_grad_batches=accumulate,
    )
    assert steps == reference()[0]


@pytest.mark.world_size(4)
def test_tensor_parallel_peers():
    mesh = {"data_parallel_replicate": 2, "tensor_parallel": 2}
    plan = {"head": "rowwise_split", "*.*.*.0": "colwise_gather"}
    steps, _ = on_mesh(
        mesh,
        strategy_options={"parallelize": plan},
        accumulate_grad_batches=2,
    )
    assert steps == reference()[0]


# ---- resuming ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where two ranks leave a checkpoint behind each step for the tests that follow."""
    return tmp_path_factory.mktemp("elastic")


def every_step(folder):
    return ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False)


@pytest.mark.world_size(2)
def test_two_ranks_save(folder):
    saving = {"callbacks": [every_step(folder)], "enable_checkpointing": True}
    on_mesh({"data_parallel_shard": 2}, accumulate_grad_batches=2, **saving)
    assert len(list(folder.glob("*.ckpt"))) == 2 * NUM_EPOCHS


def check_resume(steps, module, num_done):
    expected, plain = reference()
    assert steps == {step: samples for step, samples in expected.items() if step >= num_done}
    torch.testing.assert_close(full_state(module), dict(plain.state_dict()), **PARITY)


@pytest.mark.parametrize("num_done", [1, 2])
def test_plain_lightning_resumes_two_ranks(folder, num_done):
    """Without the strategy nobody converts Lightning's counters: steps must have as many batches as they had."""
    trainer = plain_trainer(max_epochs=NUM_EPOCHS, callbacks=[Reads()], accumulate_grad_batches=2)
    steps, module = run(trainer, {"batch_size": 4}, ckpt_path=folder / f"step={num_done}.ckpt")
    check_resume(steps, module, num_done)


@pytest.mark.world_size(1)
@pytest.mark.parametrize("num_done", [1, 2, 3])
def test_one_rank_resumes_two(folder, num_done):
    steps, module = on_mesh({}, accumulate_grad_batches=4, ckpt_path=folder / f"step={num_done}.ckpt")
    check_resume(steps, module, num_done)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("num_done", [1, 2, 5])
def test_two_ranks_resume_two(folder, num_done):
    path = folder / f"step={num_done}.ckpt"
    steps, module = on_mesh({"data_parallel_replicate": 2}, accumulate_grad_batches=2, ckpt_path=path)
    check_resume(steps, module, num_done)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("num_done", [1, 4])
def test_four_ranks_resume_two(folder, num_done):
    mesh = {"data_parallel_replicate": 2, "data_parallel_shard": 2}
    steps, module = on_mesh(mesh, {"batch_size": None}, ckpt_path=folder / f"step={num_done}.ckpt")
    check_resume(steps, module, num_done)


class AsksForSteps(Model):
    """Has the loaders built before Lightning reads the checkpoint."""

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches == 2 * NUM_EPOCHS
        return super().configure_optimizers()


@pytest.mark.world_size(2)
def test_a_module_may_ask_for_the_number_of_steps(folder):
    steps, module = on_mesh(
        {"data_parallel_replicate": 2},
        {"batch_size": 4},
        build=AsksForSteps,
        ckpt_path=folder / "step=3.ckpt",
    )
    check_resume(steps, module, 3)


@pytest.mark.world_size(2)
def test_validation_in_an_epoch_and_counters(folder):
    """Batches are counted as if the whole run had had as many in a step, so validation comes where it would have."""

    class Validates(Model):
        def on_validation_start(self):
            self.calls.append(self.global_step)

        def validation_step(self, batch, batch_idx):
            pass

    data = D9DDataModule(Numbered(), validation=Numbered(2), global_batch_size=G, batch_size=B)
    trainer = build_trainer(
        {"data_parallel_replicate": 2},
        max_epochs=NUM_EPOCHS,
        accumulate_grad_batches=2,
        val_check_interval=0.5,
        callbacks=[Reads()],
        use_distributed_sampler=True,
    )
    module = seeded(Validates)
    trainer.fit(module, data, ckpt_path=folder / "step=3.ckpt")
    assert [call for call in module.calls if isinstance(call, int)] == [4, 5, 6]
    assert trainer.fit_loop.total_batch_idx + 1 == 2 * NUM_EPOCHS * 2


class Stops(Model):
    def training_step(self, batch, batch_idx):
        if self.global_step == 1 and batch_idx == 6 and self.trainer.max_epochs == NUM_EPOCHS:
            raise InterruptedError("as a user or a full disk may do")
        return super().training_step(batch, batch_idx)


@pytest.mark.world_size(1)
def test_an_exception_loses_no_batch(tmp_path):
    """The third batch of the second step is read, and not trained on."""
    saving = {"callbacks": [OnExceptionCheckpoint(tmp_path, "stopped")], "enable_checkpointing": True}
    with pytest.raises(InterruptedError):
        on_mesh({}, build=Stops, accumulate_grad_batches=4, **saving)
    trainer = build_trainer({}, max_epochs=1, accumulate_grad_batches=4, callbacks=[reads := Reads()])
    loader = elastic_dataloader(Numbered(), global_batch_size=G, batch_size=B)
    trainer.fit(seeded(Model), loader, ckpt_path=tmp_path / "stopped.ckpt")
    assert reads.batches == [(1, reference()[0][1][start : start + B]) for start in (4, 6)]
    four_per_step = read_checkpoint(tmp_path / "stopped.ckpt")
    state = four_per_step["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]
    other = elastic_dataloader(Numbered(), global_batch_size=G, batch_size=4)
    with pytest.raises(ValueError, match=r"middle of an optimizer step, behind 2 of 4 batches .* a step has 2 now"):
        other.load_state_dict(state)


@pytest.mark.world_size(1)
def test_loaders_that_are_built_anew_go_on():
    trainer = build_trainer(
        {}, max_epochs=NUM_EPOCHS, reload_dataloaders_every_n_epochs=1, callbacks=[reads := Reads()]
    )
    trainer.fit(seeded(Model), D9DDataModule(Numbered(), global_batch_size=G))
    assert steps_of_all_ranks(reads) == reference()[0]


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.world_size(2)
def test_what_would_change_the_steps_is_refused(folder):
    mesh = {"data_parallel_replicate": 2}
    with pytest.raises(ValueError, match=r"accumulate_grad_batches \(1\) must be 2"):
        on_mesh(mesh)
    with pytest.raises(ValueError, match=r"leaves 3 batches per epoch.*whole steps of 2 batches"):
        on_mesh(mesh, accumulate_grad_batches=2, limit_train_batches=3)
    with pytest.raises(ValueError, match="overfit_batches repeats the same batches"):
        on_mesh(mesh, accumulate_grad_batches=2, overfit_batches=2)
    with pytest.raises(ValueError, match=r"cannot resume.*seed \(checkpoint: 0, now: 1\)"):
        on_mesh(mesh, {"seed": 1}, accumulate_grad_batches=2, ckpt_path=folder / "step=1.ckpt")
    with pytest.raises(RuntimeError, match="needs a Trainer with a D9DStrategy"):
        len(elastic_dataloader(Numbered(), global_batch_size=G))


@pytest.mark.parametrize(("batch_size", "message"), [(3, "Use one of 1, 3"), (None, "Use 1, 3, 9 ranks")])
def test_numbers_of_ranks_that_cannot_share_a_step(batch_size, message):
    with pytest.raises(ValueError, match=message):
        elastic_dataloader(Numbered(), global_batch_size=9, batch_size=batch_size).join(None, 2, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tail": "pad"}, r"tail \('pad'\) must be 'drop' or 'wrap'"),
        ({"tail": "dropp", "skip_steps": [(1, 2)]}, r"skip_steps \(\(1, 2\)\) must be a StepRange.*tail \('dropp'\)"),
        ({"batch_size": 3}, r"global_batch_size \(8\) is not a multiple of batch_size \(3\)\. Use 6 or 9"),
        ({"batch_size": 16}, r"not a multiple of batch_size \(16\)\. Use 16\."),
        ({"global_batch_size": "8", "batch_size": 0}, r"global_batch_size \('8'\) must be .*batch_size \(0\) must be"),
        ({"global_batch_size": 32}, r"fewer than one global batch .*set tail to 'wrap'\."),
        ({"dataset": []}, "the dataset has no samples"),
    ],
)
def test_malformed_loaders(options, message):
    with pytest.raises(ValueError, match=message):
        elastic_dataloader(**{"dataset": Numbered(), "global_batch_size": G, **options})


@pytest.mark.world_size(1)
def test_not_for_evaluation():
    class Validates(Model):
        def validation_step(self, batch, batch_idx):
            pass

    with pytest.raises(ValueError, match="elastic loader is for training"):
        build_trainer({}).validate(seeded(Validates), elastic_dataloader(Numbered(), global_batch_size=G))
