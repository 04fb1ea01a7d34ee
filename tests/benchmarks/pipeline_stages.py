"""Stages, microbatches and competitors that the pipeline benchmark measures, and the guard that all do the same work."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from d9d.core.autograd import GLOBAL_GRAD_CONTEXT, GradDirection
from d9d.core.types import TensorSpec
from d9d.pipelining.api import StageBoundary

LOSS_TOLERANCE = 1e-6
"""Relative. The competitors do the same float32 operations on a microbatch, whatever their order of microbatches."""
GRADIENT_TOLERANCE = 1e-5
"""Relative to the largest gradient of a parameter: float32 sums over microbatches in another order."""


class TinyLayer(nn.Module):
    """As little compute as a layer can have: the cost per action shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.linear(x))


class TransformerBlock(nn.Module):
    """Attention of 4 heads and an MLP, of width 256."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.RMSNorm(256), nn.RMSNorm(256)
        self.query, self.key, self.value, self.output = (nn.Linear(256, 256, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm_attention(x)
        query, key, value = (
            project(y).unflatten(-1, (4, 64)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )  # (B, H, T, D)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))  # (B, T, H * D)
        return x + self.down(F.silu(self.up(self.norm_mlp(x))))


class _SleepForInput(torch.autograd.Function):
    """The identity; sleeps in the forward pass and where the gradient of its input is computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor | None, seconds: float) -> torch.Tensor:
        ctx.seconds, ctx.anchor = seconds, anchor
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        # With an anchor this is work that only a parameter waits for.
        direction = GradDirection.inputs if ctx.anchor is None else GradDirection.weight
        if GLOBAL_GRAD_CONTEXT.check_direction(direction):
            time.sleep(ctx.seconds)
        return grads[0].clone(), None if ctx.anchor is None else torch.zeros_like(ctx.anchor), None


class _SleepForWeight(torch.autograd.Function):
    """The identity on a parameter; sleeps where its gradient is computed.

    A node of its own, so that an executor which splits the backward pass along the graph can leave it out.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        if not GLOBAL_GRAD_CONTEXT.check_direction(GradDirection.weight):
            return None, None
        time.sleep(ctx.seconds)
        return grads[0].clone(), None


class SleepLayer(nn.Module):
    """Sleeps equally long in the forward pass, for the input gradient and for the weight gradient.

    The pipeline input needs no gradient, and autograd would leave half of the backward pass of the first layer out:
    a parameter (`anchor`) keeps it in, so that all ranks have the same work and closed forms hold.
    """

    def __init__(self, seconds: float, *, is_first: bool) -> None:
        super().__init__()
        self._seconds = seconds
        self.weight = nn.Parameter(torch.randn(4))
        self.anchor = nn.Parameter(torch.zeros(1)) if is_first else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = _SleepForWeight.apply(self.weight, self._seconds)
        return _SleepForInput.apply(x, self.anchor, self._seconds) + weight


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StageKind:
    """What the stages of a run consist of.

    Attributes:
        name: As on the command line.
        shape: Of one microbatch, before and after each stage.
        sleep_s: Forward time of all layers of a rank, for layers that sleep. Each half of the backward pass as long.
    """

    name: str
    shape: tuple[int, ...]
    sleep_s: float = 0.0

    def num_layers(self, num_stages: int, num_ranks: int) -> int:
        """Return the layers of the whole model: one a stage for tiny stages, otherwise two a rank in every schedule."""
        return num_stages if self.name == "tiny" else 2 * num_ranks

    def build_layer(self, index: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            match self.name:
                case "tiny":
                    return TinyLayer()
                case "transformer":
                    return TransformerBlock()
                case _:
                    return SleepLayer(self.sleep_s / 2, is_first=index == 0)


STAGE_KINDS = {
    kind.name: kind
    for kind in (
        StageKind(name="tiny", shape=(4, 32)),
        StageKind(name="transformer", shape=(4, 64, 256)),
        StageKind(name="sleep", shape=(1, 4), sleep_s=0.01),
    )
}


class Stage(nn.Module):
    """Consecutive layers of the model, as every competitor runs them."""

    def __init__(self, kind: StageKind, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): kind.build_layer(index) for index in layers})
        self._spec = TensorSpec(shape=kind.shape, dtype=torch.float32)

    def forward(self, inputs: torch.Tensor, shared: None = None) -> torch.Tensor:
        for layer in self.layers.values():
            inputs = layer(inputs)
        return inputs

    def stage_transfer_spec(self, pipeline_input: torch.Tensor, boundary: StageBoundary) -> TensorSpec:
        return self._spec


def build_stage(kind: StageKind, index: int, num_stages: int, num_ranks: int) -> Stage:
    per_stage = kind.num_layers(num_stages, num_ranks) // num_stages
    return Stage(kind, range(index * per_stage, (index + 1) * per_stage))


@dataclasses.dataclass(frozen=True, slots=True)
class Pack:
    """Microbatches and the targets of their losses, the same on all ranks."""

    inputs: list[torch.Tensor]
    targets: list[torch.Tensor]

    @classmethod
    def build(cls, kind: StageKind, num_microbatches: int) -> "Pack":
        generator = torch.Generator().manual_seed(1)
        inputs, targets = (
            [torch.randn(kind.shape, generator=generator) for _ in range(num_microbatches)] for _ in range(2)
        )
        return cls(inputs, targets)

    def __len__(self) -> int:
        return len(self.inputs)


@dataclasses.dataclass(frozen=True, slots=True)
class Competitor:
    """One way to run a pack through the stages of this rank.

    Attributes:
        run: Runs forward and backward passes of a pack. Returns the losses on the rank of the last stage.
        stages: The modules of this rank by stage.
    """

    run: Callable[[], list[torch.Tensor]]
    stages: dict[int, nn.Module]

    def zero_grad(self) -> None:
        for stage in self.stages.values():
            for parameter in stage.parameters():
                parameter.grad = None


def check_same_work(competitor: Competitor, kind: StageKind, num_stages: int, num_ranks: int, pack: Pack) -> None:
    """Compare losses and gradients of one step with the whole model on one process.

    Raises:
        RuntimeError: They differ, or losses are missing.
    """
    losses = competitor.run()
    expected_losses, gradients = _reference(kind, num_stages, num_ranks, pack)
    if num_stages - 1 in competitor.stages:
        measured = torch.tensor([loss.item() for loss in losses])
        if len(losses) != len(pack) or not torch.allclose(measured, expected_losses, rtol=LOSS_TOLERANCE, atol=0):
            raise RuntimeError(f"the losses are {measured.tolist()} and should be {expected_losses.tolist()}.")
    for stage in competitor.stages.values():
        for name, parameter in stage.named_parameters():
            gradient, expected = parameter.grad, gradients[name]
            tolerance = GRADIENT_TOLERANCE * expected.abs().max().item()
            if gradient is None or not torch.allclose(gradient, expected, rtol=0, atol=tolerance):
                raise RuntimeError(f"the gradient of {name} is {gradient} and should be {expected}.")
    competitor.zero_grad()


def _reference(
    kind: StageKind, num_stages: int, num_ranks: int, pack: Pack
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of each microbatch, and the gradients by the names that they have in every stage."""
    awake = dataclasses.replace(kind, sleep_s=0.0)
    model = Stage(awake, range(kind.num_layers(num_stages, num_ranks)))
    losses: list[torch.Tensor] = []
    for inputs, target in zip(pack.inputs, pack.targets, strict=True):
        loss = F.mse_loss(model(inputs), target)
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return torch.stack(losses), gradients
