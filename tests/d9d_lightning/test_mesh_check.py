"""Modules that do not fit the mesh are refused before any process group exists."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d.core.dist_context import DeviceMeshParameters
from d9d.module.block.attention import GroupedQueryAttention
from d9d.module.block.moe import MoELayer
from d9d.module.block.positional import RotaryEmbeddingStyle
from d9d.module.parallelism.model import decoder_mesh_problems
from d9d.module.parallelism.plan import ParallelPlan
from d9d_lightning import D9DStrategy
from d9d_lightning.placements.mesh_check import check_mesh
from tests.d9d.module.model.catalogue import CATALOGUE
from tests.d9d_lightning.support import make_samples, plain_trainer, rank_loader


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


PLAN = {"attention": "attention", "moe": "expert"}
MESH = DeviceMeshParameters(tensor_parallel=4, data_parallel_shard=3, expert_parallel=3)


def test_layers_of_a_plan():
    plan = ParallelPlan.read(PLAN, 100, None, None)
    with pytest.raises(ValueError, match="attention, which does not fit: 4 query heads and 2 key") as caught:
        check_mesh(Blocks(), plan, MESH)
    assert "4 experts can not be shared evenly by 3 ranks. Set expert_parallel to one of 1, 2, 4" in str(caught.value)
    check_mesh(Blocks(), plan, DeviceMeshParameters(tensor_parallel=2, data_parallel_shard=2, expert_parallel=2))
    check_mesh(Late(), plan, MESH)


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
