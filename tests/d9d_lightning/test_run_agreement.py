"""D13 in Lightning: ranks that disagree are told what about, before any of them waits for another."""

from datetime import timedelta

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from d9d.core.dist_context import DeviceMeshParameters
from d9d_lightning import D9DStrategy
from d9d_lightning.jobs.run_agreement import agree_on_run
from tests.d9d_lightning.support import Regression, build_trainer, make_samples, plain_trainer, rank_loader, seeded

MESH = {"data_parallel_replicate": 2}


def of_rank(*values):
    return values[dist.get_rank()]


def fit(module=None, loader=None, strategy_options=None, mesh=MESH, **options):
    if loader is None:
        loader = rank_loader(make_samples(8), 4, dist.get_rank(), 2)
    trainer = build_trainer(mesh, strategy_options=strategy_options, **options)
    trainer.fit(module or seeded(Regression), loader)


@pytest.mark.world_size(2)
def test_arguments_of_the_trainer_and_the_strategy():
    with pytest.raises(ValueError, match="do not agree on what they run") as error:
        fit(
            max_epochs=of_rank(1, 2),
            accumulate_grad_batches=of_rank(2, 1),
            strategy_options={"bucket_size_mb": of_rank(8, 16), "on_nonfinite": of_rank("skip", "raise")},
        )
    assert str(error.value).splitlines()[1:-1] == [
        "- Trainer.max_epochs: 1 on rank 0; 2 on rank 1",
        "- Trainer.accumulate_grad_batches: 2 on rank 0; 1 on rank 1",
        "- D9DStrategy.bucket_size_mb: 8 on rank 0; 16 on rank 1",
        '- D9DStrategy.on_nonfinite: "skip" on rank 0; "raise" on rank 1',
    ]


@pytest.mark.world_size(2)
def test_fit_on_one_rank_and_validate_on_another():
    trainer = build_trainer(MESH)
    run = of_rank(trainer.fit, trainer.validate)
    with pytest.raises(ValueError, match='run: "fit" on rank 0; "validate" on rank 1'):
        run(seeded(Evaluates), rank_loader(make_samples(8), 4, dist.get_rank(), 2))


class Evaluates(Regression):
    def validation_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


class Wider(Regression):
    """Has a layer more, another shape and a frozen block on rank 1."""

    def __init__(self):
        super().__init__()
        if dist.get_rank() == 1:
            self.extra = nn.Linear(2, 2)
            self.head = nn.Linear(6, 2)
            self.blocks[0].requires_grad_(False)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [MESH, {"data_parallel_shard": 2}], ids=str)
def test_modules(mesh):
    with pytest.raises(ValueError, match="do not agree on the module") as error:
        fit(seeded(Wider), mesh=mesh)
    lines = str(error.value).splitlines()
    assert '- head.bias: "torch.float64 (1,), trained" on rank 0; "torch.float64 (2,), trained" on rank 1' in lines
    assert '- extra.bias: nothing on rank 0; "torch.float64 (2,), trained" on rank 1' in lines
    assert '- blocks.0.inner.0.bias: "torch.float64 (6,), trained" on rank 0; "torch.float64 (6,)" on rank 1' in lines
    assert lines[-1].startswith("Build the same Wider on all ranks")


class Heads(Regression):
    """As if built from a set of names, whose order each process has for itself."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(2, 2) for name in of_rank(("law", "art"), ("art", "law"))})


@pytest.mark.world_size(2)
def test_layers_in_another_order():
    with pytest.raises(ValueError, match="the order of the module's tensors") as error:
        fit(seeded(Heads))
    (line,) = str(error.value).splitlines()[1:-1]
    assert 'heads.law.weight", "heads.law.bias", "heads.art.weight"' in line.split(" on rank 0; ")[0]
    assert "Heads must get its layers in one order" in str(error.value)


@pytest.mark.world_size(2)
def test_sources_of_each_machine_and_mappers_of_each_process(tmp_path):
    class Same:
        def __call__(self, module):
            return None

        def __repr__(self):
            return f"Same of rank {dist.get_rank()}"

    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    options = {"source_checkpoint": of_rank(*folders), "load_mapper": lambda module: None, "export_mapper": Same()}
    context = DeviceMeshParameters(**MESH).build()
    agree_on_run(context, plain_trainer(), D9DStrategy(MESH, **options)._options)
    options["load_mapper"] = of_rank(options["load_mapper"], Same())
    with pytest.raises(ValueError, match=r"D9DStrategy.load_mapper: .*<lambda>\" on rank 0; \".*Same\" on rank 1"):
        agree_on_run(context, plain_trainer(), D9DStrategy(MESH, **options)._options)


class TwoGroups(Regression):
    def configure_optimizers(self):
        parts = [list(self.blocks.parameters()), list(self.head.parameters())]
        groups = [{"params": part, "lr": of_rank(0.1, 0.2)} for part in of_rank(parts, parts[::-1])]
        return of_rank(torch.optim.AdamW, torch.optim.SGD)(groups)


@pytest.mark.world_size(2)
def test_optimizers():
    with pytest.raises(ValueError, match="do not agree on the optimizers") as error:
        fit(seeded(TwoGroups))
    text = str(error.value)
    assert 'optimizers.0.kind: "AdamW" on rank 0; "SGD" on rank 1' in text
    assert "optimizers.0.groups.0.lr: 0.1 on rank 0; 0.2 on rank 1" in text
    assert 'optimizers.0.groups.1.parameters: ["head.weight", "head.bias"] on rank 0; ["blocks.0' in text


@pytest.mark.world_size(2)
def test_numbers_of_batches():
    def loader():
        return rank_loader(make_samples(of_rank(8, 12)), 4, 0, 1)

    with pytest.raises(ValueError, match="number of batches: 2 on rank 0; 3 on rank 1"):
        fit(loader=loader())
    fit(loader=loader(), limit_train_batches=2)
    fit(loader=loader(), max_steps=1, max_epochs=-1)
    fit(loader=loader(), max_time=timedelta(milliseconds=1))
    fit(module=seeded(TwoStepsByHand), loader=loader(), max_steps=4, max_epochs=-1)


class TwoStepsByHand(Regression):
    """With 4 steps it is through after 2 batches, however many there are."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()


class TakesFirst(Regression):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch["first"], batch_idx)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
def test_numbers_of_batches_of_two_loaders(mode):
    """Of 4 batches and 2 or 3, the longer loader decides, or the shorter one."""

    def loader():
        lengths = {"first": 4, "second": of_rank(2, 3)}
        return CombinedLoader({key: rank_loader(make_samples(4 * n), 4, 0, 1) for key, n in lengths.items()}, mode)

    if mode == "min_size":
        with pytest.raises(ValueError, match="number of batches: 2 on rank 0; 3 on rank 1"):
            fit(module=seeded(TakesFirst), loader=loader())
    else:
        module = seeded(TakesFirst)
        fit(module=module, loader=loader())
        assert len(module.losses) == 4


@pytest.mark.world_size(2)
def test_shuffles_of_one_dataset(monkeypatch):
    """With another seed on each rank, some samples would be read twice and others never."""
    dataset = TensorDataset(*make_samples(8, dtype=torch.float32))
    monkeypatch.setenv("PL_GLOBAL_SEED", str(of_rank(1, 2)))
    with pytest.raises(ValueError, match="seed of the shuffle: 1 on rank 0; 2 on rank 1"):
        fit(loader=DataLoader(dataset, batch_size=2, shuffle=True), use_distributed_sampler=True)


def test_a_run_of_one_process_asks_nobody():
    trainer = L.Trainer(accelerator="cpu", devices=1, fast_dev_run=True, strategy="d9d", enable_progress_bar=False)
    trainer.fit(seeded(Regression), rank_loader(make_samples(8), 4, 0, 1))
    assert trainer.global_step == 1
    assert not dist.is_initialized()
