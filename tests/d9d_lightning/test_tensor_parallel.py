"""Split layers train as on one process, alone and under replicas and shards."""

import copy
import random

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import SumMetric

from d9d.core.dist_context import DENSE_DOMAIN
from d9d_lightning import read_checkpoint
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
# What differs between them is the reduction of gradients, which other tests cover on both.
MOSTLY_SHARDED = [MESHES[4][0], pytest.param(MESHES[4][1], marks=pytest.mark.exhaustive)]


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


def train(mesh, module, *, plan=PLAN, num_steps=NUM_STEPS, ckpt_path=None, **options):
    trainer = build_trainer(mesh, strategy_options={"parallelize": plan}, gradient_clip_val=CLIP, **options)
    trainer.fit(module, loader_of(make_tokens(num_steps * BATCH), *data_ranks(mesh)), ckpt_path=ckpt_path)
    return trainer


def train_plain(module, num_steps=NUM_STEPS, ckpt_path=None, **options):
    trainer = plain_trainer(gradient_clip_val=CLIP, **options)
    trainer.fit(module, loader_of(make_tokens(num_steps * BATCH)), ckpt_path=ckpt_path)
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


class FusedBlock(nn.Module):
    """Queries, keys and values of one layer: four heads, which share two of each."""

    def __init__(self):
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (-1, 2)).transpose(1, 2)
        q, k, v = heads.split([heads.shape[1] // 2, heads.shape[1] // 4, heads.shape[1] // 4], 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o(attended.transpose(1, 2).flatten(-2))


class FusedClassifier(Classifier):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([FusedBlock() for _ in range(2)])


@pytest.mark.world_size(4)
def test_fused_layers_train_like_one_process():
    """Each group becomes a layer of its own, ``parts.0`` and so on; joined again they are what one process has."""
    module, reference = seeded(FusedClassifier), seeded(FusedClassifier)
    plan = {"embed": "vocab", "blocks.*.qkv": "colwise_fused(4, 2, 2)", "blocks.*.o": "rowwise", "blocks.*": "shard"}
    train(MESHES[4][0], module, plan=plan)
    train_plain(reference)
    torch.testing.assert_close(
        mean_over_data(torch.stack(module.losses), MESHES[4][0]), torch.stack(reference.losses), **EXACT
    )
    state, expected = full_state(module), dict(reference.state_dict())
    for block in ("blocks.0", "blocks.1"):
        for kind in ("weight", "bias"):
            parts = [state.pop(f"{block}.qkv.parts.{group}.{kind}") for group in range(3)]
            state[f"{block}.qkv.{kind}"] = torch.cat(parts)
    assert state.keys() == expected.keys()
    torch.testing.assert_close(state, {name: expected[name] for name in state}, **EXACT)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("mesh", MESHES[4], ids=str)
def test_four_ranks_train_like_one_process(mesh):
    check_training(mesh)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("mesh", MESHES[4], ids=str)
def test_accumulation(mesh):
    check_training(mesh, accumulate_grad_batches=3)


# ---- runs, checkpoints, data ---------------------------------------------------------------------------------------


class Evaluated(Classifier):
    """Counts the samples that it validates."""

    def __init__(self):
        super().__init__()
        self.seen = SumMetric()

    def validation_step(self, batch, batch_idx):
        tokens, classes = batch
        self.seen.update(len(tokens))
        self.log("seen", self.seen)
        self.log("val_loss", F.cross_entropy(self(tokens).flatten(0, 1), classes.flatten()), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


@pytest.mark.world_size(4)
@pytest.mark.parametrize("mesh", MOSTLY_SHARDED, ids=str)
def test_many_runs_and_checkpoints_of_any_mesh(mesh, tmp_path):
    """32 samples count 32 on four ranks, and a module goes through many runs as it is."""
    rank, size = data_ranks(mesh)
    samples = make_tokens(32)
    loader, whole = loader_of(samples, rank, size), loader_of(samples)
    module, reference = seeded(Evaluated), seeded(Evaluated)
    trainer = train(mesh, module)
    parameters = list(module.parameters())
    plain = train_plain(reference)
    [first], [expected] = (
        trainer.validate(module, loader, verbose=False),
        plain.validate(reference, whole, verbose=False),
    )
    assert first["seen"] == 32
    assert first["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6)
    predictions = torch.cat(trainer.predict(module, loader))
    with torch.no_grad():
        torch.testing.assert_close(predictions, torch.cat([reference(tokens) for tokens, _ in loader]), **EXACT)

    path = f"{dist_broadcast(str(tmp_path))}/a.ckpt"
    trainer.save_checkpoint(path)
    content = read_checkpoint(path)
    torch.testing.assert_close(content["state_dict"], dict(reference.state_dict()), **EXACT)
    # Resumed here and on one process, the next steps are the same.
    resumed, plain_resumed = seeded(Evaluated, seed=1), seeded(Evaluated, seed=2)
    train(mesh, resumed, num_steps=2 * NUM_STEPS, max_epochs=2, ckpt_path=path)
    train_plain(plain_resumed, num_steps=2 * NUM_STEPS, max_epochs=2, ckpt_path=path)
    torch.testing.assert_close(full_state(resumed), dict(plain_resumed.state_dict()), **EXACT)

    build_trainer(mesh, strategy_options={"parallelize": PLAN}).fit(module, loader)
    assert [id(parameter) for parameter in module.parameters()] == [id(parameter) for parameter in parameters]
    with pytest.raises(RuntimeError, match="distributed over another mesh"):
        build_trainer({"data_parallel_replicate": 4}).fit(module, loader)


def dist_broadcast(value):
    values = [value]
    dist.broadcast_object_list(values, 0)
    return values[0]


class Drawing(Dataset):
    """Samples that are drawn when they are read, by all generators there are."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()), np.random.rand(), random.random()])


class Reader(L.LightningModule):
    """Keeps what it reads, and what its dropout leaves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.dropped = nn.Dropout(0.5)
        self.read, self.kept = [], []

    def training_step(self, batch, batch_idx):
        self.read.append(batch)
        self.kept.append(self.dropped(torch.ones(16)))
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def read_by_all(mesh, num_workers):
    module = Reader()
    plan = {"layers.0": "colwise", "layers.1": "rowwise"}
    trainer = build_trainer(mesh, strategy_options={"parallelize": plan}, use_distributed_sampler=True)
    trainer.fit(module, DataLoader(Drawing(), batch_size=2, shuffle=True, num_workers=num_workers))
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (torch.cat(module.read), torch.cat(module.kept)))
    return gathered


@pytest.mark.world_size(4)
def test_peers_read_augment_and_drop_alike():
    """Without a seed that ranks have in common; peers are neighbours, and together the others read everything once."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(dist.get_rank())
    (one, kept), (peer, kept_by_peer), (other, kept_by_other), _ = read_by_all(MESHES[4][0], num_workers=0)
    torch.testing.assert_close(one, peer, rtol=0, atol=0)
    torch.testing.assert_close(kept, kept_by_peer, rtol=0, atol=0)
    assert not torch.equal(kept, kept_by_other)
    assert sorted(torch.cat([one, other])[:, 0].tolist()) == list(range(8))


@pytest.mark.world_size(4)
def test_seeded_workers_augment_peers_alike_and_others_not(monkeypatch):
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "")  # put back afterwards
    L.seed_everything(3, workers=True, verbose=False)
    one, peer, other, _ = (read for read, _ in read_by_all(MESHES[4][0], num_workers=1))
    torch.testing.assert_close(one, peer, rtol=0, atol=0)
    assert not set(one[:, 1:].flatten().tolist()) & set(other[:, 1:].flatten().tolist())


# ---- modules of other kinds ----------------------------------------------------------------------------------------


class Tied(Classifier):
    """The last layer has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight


class Frozen(Classifier):
    """A frozen base with small adapters, some of them split."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.blocks[0].mlp = nn.Sequential(Adapted(self.blocks[0].mlp[0]), nn.GELU(), self.blocks[0].mlp[2])

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Adapted(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


ADAPTED = {"blocks.0.mlp.0.base": "colwise", "blocks.0.mlp.0.up": "colwise", "blocks.0.mlp.2": "rowwise"}


class Unfreezing(Classifier):
    """Trains one block from the start and the other later."""

    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            self.blocks[1].requires_grad_(True)


class HeadsByNumber(Classifier):
    """Views features as a fixed number of heads, so that it must see all of them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        x = self.embed(tokens)
        heads = self.q(x).view(*x.shape[:2], 4, 2).softmax(-1)
        return self.head(self.norm(self.o(heads.flatten(-2))))


class Lazy(Classifier):
    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.blocks = nn.ModuleList([Block().double() for _ in range(2)])

    def reset_parameters(self):
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()


@pytest.mark.world_size(4)
@pytest.mark.parametrize("mesh", MOSTLY_SHARDED, ids=str)
@pytest.mark.parametrize(
    ("module_class", "plan"),
    [
        (Tied, PLAN),
        (Frozen, ADAPTED),
        (Unfreezing, PLAN),
        (HeadsByNumber, {"q": "colwise_dtensor", "o": "rowwise", "head": "colwise_gather"}),
        (Classifier, {"blocks.*.o": "rowwise_split", "embed": "vocab", "blocks.*": "shard", "head": "replicate"}),
    ],
)
def test_modules_train_as_on_one_process(mesh, module_class, plan):
    module, reference = seeded(module_class), seeded(module_class)
    train(mesh, module, plan=plan)
    train_plain(reference)
    torch.testing.assert_close(full_state(module), dict(reference.state_dict()), **EXACT)
    if module_class is Tied:
        assert module.head.weight is module.embed.weight


@pytest.mark.world_size(2)
def test_ties_that_a_plan_would_cut():
    plan = {"embed": "vocab"}
    with pytest.raises(ValueError, match=r"'embed.weight' \(.*\), 'head.weight' \(whole\) are one parameter"):
        train(MESHES[2][0], seeded(Tied), plan=plan)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("mesh", MOSTLY_SHARDED, ids=str)
def test_meta_layers_get_the_values_of_one_process(mesh):
    """Initial values do not depend on the mesh, so those of a mesh without splits are the same."""
    module, reference = seeded(Lazy), seeded(Lazy)
    train(mesh, module)
    build_trainer({"data_parallel_replicate": 4}, gradient_clip_val=CLIP).fit(
        reference, loader_of(make_tokens(NUM_STEPS * BATCH), dist.get_rank(), 4)
    )
    torch.testing.assert_close(full_state(module), full_state(reference), **EXACT)


@pytest.mark.world_size(2)
def test_copies_compute_alike():
    module = seeded(Classifier)
    train(MESHES[2][0], module)
    other = copy.deepcopy(module.blocks)
    x = torch.ones(1, 2, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(other[0](x), module.blocks[0](x), rtol=0, atol=0)


class InSequence(nn.Module):
    """A norm before two layers; with a plan, each rank normalises a part of the samples."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())


class Sequences(Classifier):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([InSequence() for _ in range(2)])


@pytest.mark.world_size(4)
@pytest.mark.parametrize("mesh", MESHES[4], ids=str)
def test_styles_of_torch_whose_gradients_are_partial_sums(mesh):
    plan = {
        # Along the samples, as torch 2.11 cannot gather along dimension 1 for a linear layer here.
        "blocks.*": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
        "blocks.*.norm": SequenceParallel(sequence_dim=0),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(0)),
        "blocks.*.down": RowwiseParallel(),
    }
    module, reference = seeded(Sequences), seeded(Sequences)
    trainer = train(mesh, module, plan=plan)
    train_plain(reference)
    squares = sum(gradient.square().sum() for gradient in reference.seen_gradients[-1].values())
    torch.testing.assert_close(trainer.strategy.last_grad_norm, squares.sqrt(), **EXACT)
    torch.testing.assert_close(full_state(module), dict(reference.state_dict()), **EXACT)


@pytest.mark.world_size(2)
def test_a_function_may_split():
    def plan(module, context):
        tp = context.mesh_for(DENSE_DOMAIN)["tp"]
        parallelize_module(module, tp, {"head": ColwiseParallel(output_layouts=Replicate())})

    module, reference = seeded(Classifier), seeded(Classifier)
    train(MESHES[2][0], module, plan=plan)
    train_plain(reference)
    assert isinstance(module.head.weight, DTensor)
    torch.testing.assert_close(full_state(module), dict(reference.state_dict()), **EXACT)


@pytest.mark.world_size(2)
def test_each_part_of_a_gradient_counts_once_in_the_norm():
    """A13: parts (3, 4) and (0, 12) on two ranks are a norm of 13, whoever else has what is whole."""

    class Given(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(1, 4, bias=False), nn.Linear(4, 1, bias=False)
            self.second.requires_grad_(False)
            nn.init.constant_(self.second.weight, 1.0)

        def training_step(self, batch, batch_idx):
            scale = torch.tensor([3.0, 4.0, 0.0, 12.0])
            with torch.no_grad():
                rank = self.trainer.strategy.mesh.world_size > 1 and dist.get_rank()
                local = scale.chunk(2)[rank] if self.trainer.strategy.mesh.world_size > 1 else scale
            return self.second(self.first(torch.ones(1, 1)) * local).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.first.parameters(), lr=1.0)

    module = Given()
    before = module.first.weight.detach().clone()
    plan = {"first": "colwise", "second": "rowwise"}
    trainer = build_trainer(MESHES[2][0], strategy_options={"parallelize": plan}, gradient_clip_val=1.3, max_steps=1)
    trainer.fit(module, DataLoader(torch.zeros(1, 1)))
    assert trainer.strategy.last_grad_norm.item() == pytest.approx(13.0)
    expected = before - 0.1 * torch.tensor([[3.0], [4.0], [0.0], [12.0]])
    torch.testing.assert_close(full(module.first.weight), expected)
