"""Split layers train as on one process, alone and under replicas and shards."""

import copy

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

from d9d_lightning.checkpoint import gather_checkpoint
from tests.d9d_lightning.support import build_trainer, full, full_gradients, full_state, plain_trainer, seeded

EXACT = {"rtol": 1e-11, "atol": 1e-11}  # fp64
NUM_STEPS = 3
BATCH = 8
CLIP = 0.2
# Neither the vocabulary nor the classes are a multiple of the ranks.
VOCABULARY, CLASSES, WIDTH, LENGTH = 11, 7, 8, 5

PLAN = {
    "embed": "vocab",
    "blocks.*.q": "colwise",
    "blocks.*.k": "colwise",
    "blocks.*.v": "colwise",
    "blocks.*.o": "rowwise",
    "blocks.*.mlp.0": "colwise",
    "blocks.*.mlp.2": "rowwise",
    "head": "colwise_gather",
}
MESHES = {
    2: [{"tensor_parallel": 2}],
    4: [
        {"tensor_parallel": 2, "data_parallel_shard": 2},
        {"tensor_parallel": 2, "data_parallel_replicate": 2},
    ],
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, x):
        q, k, v = (part(self.norm(x)).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.o(attended)
        return x + self.mlp(x)


class Classifier(L.LightningModule):
    """An ordinary little transformer. Nothing in it is about parallelism."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.losses, self.norms, self.seen_gradients = [], [], []

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch, batch_idx):
        tokens, classes = batch
        loss = F.cross_entropy(self(tokens).flatten(0, 1), classes.flatten())
        self.losses.append(loss.detach())
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.seen_gradients.append(full_gradients(self))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


def make_tokens(num_samples):
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(VOCABULARY, (num_samples, LENGTH), generator=generator)
    return tokens, (tokens * 3 + 1) % CLASSES


def loader_of(tensors, rank=0, size=1):
    """The part of each batch that is of one data-parallel rank."""
    parts = [tensor.unflatten(0, (-1, size, BATCH // size))[:, rank].flatten(0, 1) for tensor in tensors]
    return DataLoader(TensorDataset(*parts), batch_size=BATCH // size)


def data_ranks(mesh):
    size = dist.get_world_size() // 2
    # Tensor parallelism is the innermost dimension.
    return dist.get_rank() // 2, size


def train(mesh, module, *, plan=PLAN, num_steps=NUM_STEPS, **options):
    trainer = build_trainer(mesh, strategy_options={"parallelize": plan}, gradient_clip_val=CLIP, **options)
    trainer.fit(module, loader_of(make_tokens(num_steps * BATCH), *data_ranks(mesh)))
    return trainer


def train_plain(module, num_steps=NUM_STEPS, **options):
    trainer = plain_trainer(gradient_clip_val=CLIP, **options)
    trainer.fit(module, loader_of(make_tokens(num_steps * BATCH)))
    return trainer


def mean_over_data(tensor, mesh):
    """Peers have the same value, so the mean over all ranks is that over the data."""
    total = tensor.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def check_training(mesh, **options):
    module, reference = seeded(Classifier), seeded(Classifier)
    trainer = train(mesh, module, **options)
    train_plain(reference, **options)
    losses, expected = torch.stack(module.losses), torch.stack(reference.losses)
    torch.testing.assert_close(mean_over_data(losses, mesh), expected, **EXACT)
    torch.testing.assert_close(module.seen_gradients, reference.seen_gradients, **EXACT)
    squares = sum(gradient.square().sum() for gradient in reference.seen_gradients[-1].values())
    torch.testing.assert_close(trainer.strategy.last_grad_norm, squares.sqrt(), **EXACT)
    torch.testing.assert_close(full_state(module), dict(reference.state_dict()), **EXACT)
    return module, trainer


@pytest.mark.world_size(2)
def test_two_tensor_parallel_ranks_train_like_one_process():
    module, _ = check_training(MESHES[2][0])
    layouts = {name: p.placements for name, p in module.named_parameters() if isinstance(p, DTensor)}
    assert layouts["embed.weight"] == layouts["blocks.0.q.weight"] == layouts["head.bias"] == (Shard(0),)
    assert layouts["blocks.1.o.weight"] == (Shard(1),)
    assert layouts["blocks.1.o.bias"] == (Replicate(),)
    assert "norm.weight" not in layouts


@pytest.mark.world_size(4)
@pytest.mark.parametrize("mesh", MESHES[4], ids=str)
def test_four_ranks_train_like_one_process(mesh):
    check_training(mesh)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("mesh", MESHES[4], ids=str)
def test_accumulation(mesh):
    check_training(mesh, accumulate_grad_batches=3)
