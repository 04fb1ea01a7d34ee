"""Replicated and sharded data parallelism against torch's own, on the same model and batches.

Run: torchrun --nproc-per-node 2 -m tests.benchmarks.data_parallel [--model mlp|transformer]
"""

import argparse
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters, DistributedContext
from d9d.internals.fsdp_accumulation import FsdpAccumulation
from d9d.internals.grad_sync import GradientSynchronizer
from d9d.module.parallelism.api import parallelize_hsdp
from d9d.optim import localize_optimizer
from tests.benchmarks.rounds import report, time_rounds


class MLP(nn.Module):
    """50 small layers: the cost per parameter shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(50))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class Transformer(nn.Module):
    """6 blocks of width 192 and a vocabulary of 1024: 3 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1024, 192)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(192, 4, 768, dropout=0.0, batch_first=True, norm_first=True) for _ in range(6)
        )
        self.head = nn.Linear(192, 1024, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    if kind == "mlp":
        return MLP(), torch.randn(4, 64)
    return Transformer(), torch.randint(0, 1024, (4, 64))


def step_of(
    model: nn.Module,
    x: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    before_backward: Callable[[bool], object],
    after_backward: Callable[[], object],
    num_microbatches: int,
) -> Callable[[], None]:
    def step() -> None:
        for index in range(num_microbatches):
            loss = model(x).square().mean()
            before_backward(index == num_microbatches - 1)
            loss.backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(kind: str, context: DistributedContext, num_microbatches: int) -> Callable[[], None]:
    model, x = build(kind)
    mesh = context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard", "cp_replicate"]
    if context.mesh_params.has_data_parallel_shard:
        for layer in model.layers:
            parallelize_hsdp(layer, mesh)
    parallelize_hsdp(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    localize_optimizer(optimizer)
    synchronizer = GradientSynchronizer([list(model.parameters())], 32)
    synchronizer.bind()
    fsdp = FsdpAccumulation([model])
    fsdp.start_pack(num_microbatches)
    factor = torch.tensor(1.0 / (context.dp_size * num_microbatches))

    def before_backward(is_last: bool) -> None:
        fsdp.before_backward(is_last=is_last)
        synchronizer.set_required_accumulations(int(is_last))

    def after_backward() -> None:
        synchronizer.wait()
        synchronizer.scale_grads(factor)

    optimizer.zero_grad = lambda set_to_none=True: synchronizer.zero_grad()  # the loop does this without the optimizer
    return step_of(model, x, optimizer, before_backward, after_backward, num_microbatches)


def torch_ddp(kind: str, num_microbatches: int) -> Callable[[], None]:
    model, x = build(kind)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def before_backward(is_last: bool) -> None:
        wrapped.require_backward_grad_sync = is_last

    return step_of(wrapped, x, optimizer, before_backward, lambda: None, num_microbatches)


def torch_fsdp(kind: str, world_size: int, num_microbatches: int) -> Callable[[], None]:
    model, x = build(kind)
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Torch's fused AdamW on DTensors, as a hand-written loop has it.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    return step_of(model, x, optimizer, lambda is_last: None, lambda: None, num_microbatches)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["mlp", "transformer"], default="mlp")
    parser.add_argument("--only", choices=["replicated", "sharded"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    world_size = int(os.environ["WORLD_SIZE"])
    replicate = DeviceMeshParameters(data_parallel_replicate=world_size).build()
    shard = DeviceMeshParameters(data_parallel_shard=world_size).build()
    for num_microbatches in (1, 4):
        # Built when their turn comes, so that one comparison does not hold the memory of the other.
        comparisons = {
            "replicated": ("ddp", torch_ddp, replicate),
            "sharded": ("fully_shard", lambda model, count: torch_fsdp(model, world_size, count), shard),
        }
        for title, (peer_name, build_peer, context) in comparisons.items():
            if arguments.only not in (None, title):
                continue
            variants = {
                peer_name: build_peer(arguments.model, num_microbatches),
                "d9d": ours(arguments.model, context, num_microbatches),
            }
            times = time_rounds(variants, num_calls=arguments.calls, num_rounds=arguments.rounds)
            report(f"{title}, {arguments.model}, {num_microbatches} microbatches", times, peer_name)


if __name__ == "__main__":
    main()
