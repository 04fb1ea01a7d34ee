"""Modules that do not fit the mesh are refused before any process group exists."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.module.block.attention import GroupedQueryAttention
from d9d.module.block.moe import MoELayer
from d9d.module.block.positional import RotaryEmbeddingStyle
from d9d.module.parallelism.model import decoder_mesh_problems
from d9d.module.parallelism.plan import ParallelPlan
from d9d_lightning import D9DStrategy
from d9d_lightning.placements.mesh_check import check_mesh
from tests.d9d.module.model.catalogue import CATALOGUE
from tests.d9d_lightning.support import build_trainer, make_samples, plain_trainer, rank_loader


class Blocks(L.LightningModule):
    """Heads 4, key and value heads 2, experts 4."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = GroupedQueryAttention(8, 4, 2, 4, None, is_causal=True, rope_style=RotaryEmbeddingStyle.HALF)
        self.moe = MoELayer(8, 4, 4, 2, True)

    def training_step(self, batch: object, batch_idx: int) -> torch.Tensor:
        raise AssertionError("no step shall run")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Asked(L.LightningModule):
    """Says by itself what does not fit, for a function that distributes it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)

    def mesh_problems(self, mesh: DeviceMeshParameters) -> list[str]:
        return decoder_mesh_problems(CATALOGUE["qwen3 moe"].params(False), mesh)


class Late(Blocks):
    """Is not built yet."""

    def configure_model(self) -> None:
        """Build nothing here."""


class Headless(L.LightningModule):
    """A setup hook builds the layers that the plan splits."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return (self.head(x).squeeze(-1) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def build_head(module: L.LightningModule) -> None:
    module.head = nn.Linear(6, 1, dtype=torch.float64)


class BuildsInSetup(Headless):
    def setup(self, stage: str) -> None:
        build_head(self)


class DataModule(L.LightningDataModule):
    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        build_head(self.trainer.lightning_module)

    def train_dataloader(self) -> object:
        return rank_loader(make_samples(4), 2, 0, 1)


class BuildingCallback(L.Callback):
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        build_head(pl_module)


PLAN = {"attention": "attention", "moe": "expert"}
MESH = DeviceMeshParameters(tensor_parallel=4, data_parallel_shard=3, expert_parallel=3)


def test_layers_of_a_plan():
    plan = ParallelPlan.read(PLAN, 100, None, None)
    with pytest.raises(ValueError, match="attention, which does not fit: 4 query heads and 2 key") as caught:
        check_mesh(Blocks(), plan, MESH)
    assert "4 experts can not be shared evenly by 3 ranks. Set expert_parallel to one of 1, 2, 4" in str(caught.value)
    check_mesh(Blocks(), plan, DeviceMeshParameters(tensor_parallel=2, data_parallel_shard=2, expert_parallel=2))
    check_mesh(Late(), plan, MESH)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("builder", ["module", "data module", "callback", "function"])
def test_plans_of_layers_that_a_setup_hook_builds(builder: str):
    function = LambdaCallback(setup=lambda trainer, module, stage: build_head(module))
    callbacks = {"callback": [BuildingCallback()], "function": [function]}.get(builder, [])
    options = {"parallelize": {"head": "rowwise_split"}}
    trainer = build_trainer({"tensor_parallel": 2}, strategy_options=options, callbacks=callbacks)
    data = DataModule() if builder == "data module" else rank_loader(make_samples(4), 2, 0, 1)
    module = BuildsInSetup() if builder == "module" else Headless()
    trainer.fit(module, data)
    assert trainer.global_step == 2
    assert module.head.weight.to_local().shape == (1, 3)


class Halves(L.LightningModule):
    """Divides its heads when a function distributes it, and says how many it has now."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.head = nn.Linear(6, 1, dtype=torch.float64)

    def mesh_problems(self, mesh: DeviceMeshParameters) -> list[str]:
        return [] if self.num_heads % mesh.tensor_parallel == 0 else [f"{self.num_heads} heads."]

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self.head(batch[0])


def halve(module: nn.Module, context: DistributedContext) -> None:
    assert isinstance(module, Halves)
    module.num_heads //= context.mesh_params.tensor_parallel


@pytest.mark.world_size(2)
def test_a_module_of_an_earlier_run_is_not_asked_again():
    module, loader = Halves(), rank_loader(make_samples(4), 2, 0, 1)
    for _ in range(2):
        trainer = build_trainer({"tensor_parallel": 2}, strategy_options={"parallelize": halve})
        trainer.validate(module, loader, verbose=False)
        assert module.num_heads == 1


def test_modules_that_know_it_are_asked():
    plan = ParallelPlan.read(lambda module, context: None, 100, None, None)
    with pytest.raises(ValueError, match="Asked does not fit the mesh:\n- 4 query heads and 2 key and value") as caught:
        check_mesh(Asked(), plan, MESH)
    assert "Set expert_parallel to one of 1, 2, 4" in str(caught.value)
    check_mesh(Asked(), plan, DeviceMeshParameters(tensor_parallel=2))


def test_the_trainer_refuses_them_early(monkeypatch: pytest.MonkeyPatch):
    """As torchrun would start the first of two processes, of which the other need not come."""
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    launcher = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in {**ranks, **launcher}.items():
        monkeypatch.setenv(name, value)
    strategy = D9DStrategy(mesh={"tensor_parallel": 2}, parallelize={"attention": "attention", "head": "colwise"})
    module = Blocks()
    module.head = nn.Linear(8, 3)
    module.attention = GroupedQueryAttention(8, 3, 3, 4, None, is_causal=True, rope_style=RotaryEmbeddingStyle.HALF)
    with pytest.raises(ValueError, match="3 query heads and 3 key and value heads"):
        plain_trainer(strategy=strategy, devices=2).fit(module, rank_loader(make_samples(4), 2, 0, 1))
    assert not dist.is_initialized()
