"""Small LightningModules, and Trainers on the ranks of the pool."""

import os
from collections.abc import Sequence

import lightning as L
import torch
import torch.nn.functional as F
from lightning.fabric.plugins import ClusterEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from d9d_lightning import D9DStrategy

MESHES = {
    2: [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}],
    4: [{"data_parallel_replicate": 2, "data_parallel_shard": 2}],
}
NUM_FEATURES = 6


class PoolEnvironment(ClusterEnvironment):
    """The ranks of the pool, as a launcher that has started them."""

    @property
    def creates_processes_externally(self):
        return True

    @property
    def main_address(self):
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self):
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect():
        return False

    def world_size(self):
        return int(os.environ["WORLD_SIZE"])

    def set_world_size(self, size):
        pass

    def global_rank(self):
        return int(os.environ["RANK"])

    def set_global_rank(self, rank):
        pass

    def local_rank(self):
        return int(os.environ["LOCAL_RANK"])

    def node_rank(self):
        return 0


def build_trainer(mesh, *, strategy_options=None, **options):
    """A Trainer without files and bars on all ranks of the pool."""
    strategy = D9DStrategy(mesh, **{"min_unit_params": 20, **(strategy_options or {})})
    return plain_trainer(strategy=strategy, devices=strategy.mesh.world_size, plugins=[PoolEnvironment()], **options)


def plain_trainer(**options):
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    return L.Trainer(**{**defaults, **options})


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x):
        return x + self.inner(x)


class Regression(L.LightningModule):
    """Two repeated blocks and a head that belongs to the root, trained with AdamW on mean squared errors."""

    def __init__(self, width=NUM_FEATURES, learning_rate=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, 1)
        self.losses = []
        self.seen_gradients = []
        self.calls = []

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(-1)

    def training_step(self, batch, batch_idx):
        self.calls.append("training_step")
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.losses.append(loss.detach())
        return loss

    def on_after_backward(self):
        self.calls.append("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        self.calls.append("on_before_optimizer_step")
        self.seen_gradients.append(full_gradients(self))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, weight_decay=0.1)


def full(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()


def full_gradients(module):
    return {name: None if p.grad is None else full(p.grad) for name, p in module.named_parameters()}


def full_state(module):
    return {name: full(tensor) for name, tensor in module.state_dict().items()}


def make_samples(num_samples, num_features=NUM_FEATURES, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, num_features, generator=generator, dtype=torch.float64)
    y = x.sum(-1).sin()
    return x.to(dtype), y.to(dtype)


def rank_loader(tensors: Sequence[torch.Tensor], batch_size: int, rank: int, world_size: int):
    """Each rank's part of consecutive global batches of `batch_size` samples."""
    part = batch_size // world_size
    index = [start + rank * part + offset for start in range(0, len(tensors[0]), batch_size) for offset in range(part)]
    index = [each for each in index if each < len(tensors[0])]
    return DataLoader(TensorDataset(*[tensor[index] for tensor in tensors]), batch_size=part)


def seeded(build, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return build().to(dtype)
