"""Experts by the word "expert": a module with a mixture of experts trains on every mesh as on one process."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from d9d.core.side_loss import announce_loss
from d9d.core.types import TensorSpec
from d9d.module.block.moe import MoELayer, RouterLossParameters
from d9d_lightning import D9DStrategy, PipelineStages, read_checkpoint
from tests.d9d_lightning.support import build_trainer, seeded
from tests.harness.parity import FP64_EXACT, assert_close_tree, named_full_parameters

VOCABULARY, HIDDEN, EXPERTS, TOKENS = 11, 6, 4, 3
NUM_STEPS, GLOBAL_BATCH = 3, 8
PIPELINE = {
    "pipeline_module": "layers",
    "microbatches": 2,
    # Experts read how many tokens they have, so the shapes are not found without data.
    "stages": PipelineStages(transfer_spec=lambda stage, x: TensorSpec(tuple(x.shape), x.dtype)),
}
PLAN = {"layers.*.moe": "expert"}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.moe = MoELayer(HIDDEN, 5, EXPERTS, 2, True)
        self.moe.use_router_losses(RouterLossParameters(load_balancing=0.5, z_loss=0.1))

    def forward(self, x):
        return x + self.moe(self.norm(x))


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.Sequential(*[Layer() for _ in range(2)])
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        self.double()

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        x = self.layers(self.embed(tokens))
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader(batch_size: int, rank: int = 0, num_ranks: int = 1) -> DataLoader:
    """Each rank has its part of every global batch."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (NUM_STEPS, GLOBAL_BATCH, TOKENS), generator=generator)
    own = tokens.chunk(num_ranks, 1)[rank].flatten(0, 1)
    return DataLoader(TensorDataset(own), batch_size=batch_size)


@pytest.mark.world_size(2)
def test_checkpoints_have_all_experts(tmp_path):
    mesh = {"data_parallel_shard": 2, "expert_parallel": 2}
    trainers = [build_trainer(mesh, strategy_options={"parallelize": PLAN}) for _ in range(2)]
    modules = [seeded(Model), Model()]
    rank = torch.distributed.get_rank()
    trainers[0].fit(modules[0], loader(4, rank, 2))
    trainers[0].save_checkpoint(tmp_path / "all.ckpt")
    states = read_checkpoint(tmp_path / "all.ckpt")["state_dict"]
    trained = named_full_parameters(modules[0])
    assert_close_tree({name: states[name] for name in trained}, trained, rtol=0, atol=0)
    trainers[1].fit(modules[1], loader(4, rank, 2), ckpt_path=tmp_path / "all.ckpt", weights_only=True)
    assert_close_tree(named_full_parameters(modules[1]), trained, rtol=0, atol=0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "mesh",
    [
        {"data_parallel_replicate": 2, "expert_parallel": 2},
        {"data_parallel_shard": 2, "expert_parallel": 2},
        {"data_parallel_shard": 2},
    ],
    ids=str,
)
def test_two_ranks_train_as_one_process(mesh):
    check(mesh)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("degree", ["data_parallel_replicate", "pipeline_parallel"])
def test_four_ranks_train_as_one_process(degree):
    check({"data_parallel_shard": 2, "expert_parallel": 2, degree: 2})


@pytest.mark.world_size(2)
def test_a_pipeline_with_weights_and_router_losses_is_refused():
    class Weighted(Model):
        def training_step(self, batch, batch_idx):
            return {"loss": super().training_step(batch, batch_idx), "loss_weight": 2.0}

    trainer = build_trainer({"pipeline_parallel": 2}, strategy_options=PIPELINE)
    with pytest.raises(RuntimeError, match="only the last stage sees the weight"):
        trainer.fit(seeded(Weighted), loader(8))


def train_plainly() -> Model:
    """In plain PyTorch, with the router losses in the loss."""
    module = seeded(Model)
    optimizer = module.configure_optimizers()
    for (tokens,) in loader(GLOBAL_BATCH):
        optimizer.zero_grad()
        announce_loss(module.training_step((tokens,), 0)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
    return module


def check(mesh):
    module = seeded(Model)
    options = PIPELINE if "pipeline_parallel" in mesh else {}
    trainer = build_trainer(mesh, strategy_options={"parallelize": PLAN, **options}, gradient_clip_val=0.1)
    num_ranks = trainer.strategy.mesh.data_ranks
    rank = torch.distributed.get_rank() % num_ranks  # pipeline ranks are outermost
    trainer.fit(module, loader(GLOBAL_BATCH // num_ranks, rank, num_ranks))
    assert trainer.global_step == NUM_STEPS
    found, expected = named_full_parameters(module), named_full_parameters(train_plainly())
    if "pipeline_parallel" in mesh:
        assert len(found) < len(expected)
        expected = {name: expected[name] for name in found}
    assert_close_tree(found, expected, rtol=0, atol=FP64_EXACT)


def test_explained():
    text = D9DStrategy({"data_parallel_shard": 2, "expert_parallel": 2}, PLAN).explain(Model())
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    cells = [cell.strip() for cell in rows["layers.{0-1}.moe.grouped_experts.up_proj.weight"].split("  ") if cell]
    # 2 of 4 experts of 6 x 5 doubles, in 2 layers; half of 11 rows.
    assert cells[2:5] == ["expert", "ep_shard dim 0", "float64"]
    assert cells[5] == f"{2 * 2 * 30 * 8} B"
    assert "replicated" in rows["layers.{0-1}.moe.router.gate.weight"]
    assert f"{6 * HIDDEN * 8} B" in rows["embed.weight"]


@pytest.mark.parametrize(
    ("mesh", "plan", "message"),
    [
        ({"data_parallel_shard": 2, "expert_parallel": 2}, None, r"nothing says which .*: layers\.\{0-1\}\.moe"),
        ({"data_parallel_shard": 3, "expert_parallel": 3}, PLAN, r"4 experts can not be shared evenly by 3 ranks"),
        ({}, {"embed": "expert"}, r"which is a Embedding, but 'expert' is for MoELayer"),
    ],
)
def test_what_is_wrong(mesh, plan, message):
    with pytest.raises(ValueError, match=message):
        D9DStrategy(mesh, plan).explain(Model())
