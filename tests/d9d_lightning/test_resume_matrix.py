"""A fit that goes on under any other mesh: states bit for bit, then the training of plain Lightning on one process."""

from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.types import TensorSpec
from d9d.module.block.moe import MoELayer
from d9d_lightning import PipelineStages, read_checkpoint
from tests.d9d_lightning.support import build_trainer, plain_trainer, rank_loader, seeded
from tests.harness.parity import FP64_EXACT, assert_close_tree
from tests.harness.plugin import OnRanks

VOCABULARY, HIDDEN, TOKENS = 11, 6, 3
BATCH, BATCHES_PER_EPOCH = 8, 3
EPOCHS_BEFORE, EPOCHS = 1, 3
PLAN = {
    "embed": "vocab",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "layers.*.moe": "expert",
    "head": "colwise_gather",
}
MESHES: dict[str, dict[str, int]] = {
    "1": {},
    "replicate 2": {"data_parallel_replicate": 2},
    "shard 2": {"data_parallel_shard": 2},
    "tp 2": {"tensor_parallel": 2},
    "pp 2": {"pipeline_parallel": 2},
    "ep 2": {"data_parallel_shard": 2, "expert_parallel": 2},
    "hsdp 2 x 2": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
    "tp 2 x shard 2": {"tensor_parallel": 2, "data_parallel_shard": 2},
    "pp 4": {"pipeline_parallel": 4},
    "pp 2 x shard 2": {"pipeline_parallel": 2, "data_parallel_shard": 2},
    "pp 2 x ep 2": {"pipeline_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 2},
    "ep 4": {"data_parallel_shard": 4, "expert_parallel": 4},
}
DEFAULT = ("pp 2", ["tp 2"])
"""What runs each time: a mesh that saves, and those that go on. All else is exhaustive."""


class Layer(nn.Module):
    """A number of rows that ranks do not share evenly, and a weight that is not trained."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 10), nn.Linear(10, HIDDEN)
        self.moe = MoELayer(HIDDEN, 5, 4, 2, True)
        self.frozen = nn.Parameter(torch.randn(HIDDEN), requires_grad=False)

    def forward(self, x):
        x = x + self.down(self.up(self.norm(x)).tanh()) * self.frozen
        return x + self.moe(x)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.Sequential(*[Layer() for _ in range(4)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        logits = self.head(self.layers(self.embed(tokens)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.ndim > 1]
        vectors = [parameter for parameter in trained if parameter.ndim == 1]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.5)]


def data(rank: int = 0, num_ranks: int = 1):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCHES_PER_EPOCH * BATCH, TOKENS), generator=generator)
    return rank_loader([tokens], BATCH, rank, num_ranks)


class SavesAtStart(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def fit(mesh: dict[str, int], saved: Path | None, *, seed: int, **options) -> L.Trainer:
    stages = {
        "pipeline_module": "layers",
        "microbatches": 2,
        # Experts read how many tokens they have, so the shapes are not found without data.
        "stages": PipelineStages(transfer_spec=lambda stage, x: TensorSpec(tuple(x.shape), x.dtype)),
    }
    strategy = {"parallelize": PLAN, **(stages if "pipeline_parallel" in mesh else {})}
    trainer = build_trainer(mesh, strategy_options=strategy, **options)
    ranks = trainer.strategy.distributed_sampler_kwargs
    trainer.fit(seeded(Model, seed=seed), data(ranks["rank"], ranks["num_replicas"]), ckpt_path=saved)
    return trainer


def start(mesh: dict[str, int], folder: Path) -> None:
    trainer = fit(mesh, None, seed=0, max_epochs=EPOCHS_BEFORE)
    trainer.save_checkpoint(folder / "saved")


def go_on(mesh: dict[str, int], folder: Path, name: str) -> None:
    callbacks = [SavesAtStart(folder / name / "start")]
    trainer = fit(mesh, folder / "saved", seed=1, max_epochs=EPOCHS, callbacks=callbacks)
    trainer.save_checkpoint(folder / name / "end")
    if dist.is_initialized():
        dist.barrier()


def weights_and_optimizer(path: Path) -> dict[str, object]:
    checkpoint = read_checkpoint(path)
    return {name: checkpoint[name] for name in ("state_dict", "optimizer_states", "lr_schedulers")}


def plainly(folder: Path, num_epochs: int) -> dict[str, object]:
    trainer = plain_trainer(max_epochs=num_epochs)
    trainer.fit(seeded(Model), data())
    trainer.save_checkpoint(folder / f"{num_epochs}.ckpt")
    checkpoint = torch.load(folder / f"{num_epochs}.ckpt", weights_only=True)
    return {name: checkpoint[name] for name in ("state_dict", "optimizer_states")}


@pytest.mark.timeout_s(900)
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        pytest.param(*DEFAULT, id="default"),
        *(pytest.param(saved, list(MESHES), id=saved, marks=pytest.mark.exhaustive) for saved in MESHES),
    ],
)
def test_a_fit_goes_on_under_another_mesh(tmp_path: Path, on_ranks: OnRanks, saved: str, resumed: list[str]):
    on_ranks(_size(saved), start, mesh=MESHES[saved], folder=tmp_path)
    before = weights_and_optimizer(tmp_path / "saved")
    expected = {num_epochs: plainly(tmp_path, num_epochs) for num_epochs in (EPOCHS_BEFORE, EPOCHS)}
    check_close(before, expected[EPOCHS_BEFORE])
    for name in resumed:
        on_ranks(_size(name), go_on, mesh=MESHES[name], folder=tmp_path, name=name)
        assert_close_tree(weights_and_optimizer(tmp_path / name / "start"), before, rtol=0, atol=0)
        check_close(weights_and_optimizer(tmp_path / name / "end"), expected[EPOCHS])


def check_close(found: dict[str, object], expected: dict[str, object]) -> None:
    assert_close_tree({name: found[name] for name in expected}, expected, rtol=0, atol=FP64_EXACT)


def _size(mesh: str) -> int:
    return DeviceMeshParameters(**MESHES[mesh]).world_size
