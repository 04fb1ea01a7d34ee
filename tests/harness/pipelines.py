"""Pipelines for tests: every schedule by name, small stages, and the same stages on one process."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import nn
from torch.utils.checkpoint import checkpoint

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.types import TensorSpec
from d9d.pipelining.actions import ActionBase
from d9d.pipelining.api import BackwardObserver, PipelineStageInfo, StageBoundary
from d9d.pipelining.executor import PipelineScheduleExecutor
from d9d.pipelining.factory import AnyPipelineScheduleConfig, build_program_builder_from, build_schedule

CONFIG = TypeAdapter[AnyPipelineScheduleConfig](AnyPipelineScheduleConfig)

TRAINING_SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe"},
    "looped_bfs_1": {"schedule": "looped_bfs", "num_stages_per_rank": 1},
    "looped_bfs_2": {"schedule": "looped_bfs", "num_stages_per_rank": 2},
    "1f1b_1": {"schedule": "1f1b", "num_stages_per_rank": 1, "zero_bubble": False},
    "1f1b_2": {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": False},
    "zero_bubble_1": {"schedule": "1f1b", "num_stages_per_rank": 1, "zero_bubble": True},
    "zero_bubble_2": {"schedule": "1f1b", "num_stages_per_rank": 2, "zero_bubble": True},
    "zero_bubble_v": {"schedule": "zero_bubble_v"},
    "dual_pipe_v": {"schedule": "dual_pipe_v"},
}
SCHEDULES = {**TRAINING_SCHEDULES, "inference": {"schedule": "inference"}}
"""Configs by a name of our own."""

BUILD_STAGE = Callable[[PipelineStageInfo], nn.Module]


class Pipeline(NamedTuple):
    """What `build_pipeline` returns: the executor, and the modules of this rank by stage."""

    executor: PipelineScheduleExecutor
    modules: dict[int, Any]
    num_stages: int
    has_last_stage: bool


def build_pipeline(schedule: str, pp_size: int, build_stage: BUILD_STAGE) -> Pipeline:
    """Build a pipeline over all ranks, with a group of its own. A collective."""
    modules: dict[int, nn.Module] = {}
    num_stages = 0

    def provide(info: PipelineStageInfo) -> nn.Module:
        nonlocal num_stages
        num_stages = info.num_stages
        modules[info.current_stage] = build_stage(info)
        return modules[info.current_stage]

    context = DeviceMeshParameters(pipeline_parallel=pp_size).build()
    info, _ = build_schedule(context, CONFIG.validate_python(SCHEDULES[schedule]), provide)
    assert isinstance(info.schedule, PipelineScheduleExecutor)
    return Pipeline(info.schedule, modules, num_stages, info.has_last_stage)


def program_of(schedule: str, pp_size: int, num_microbatches: int, rank: int) -> list[ActionBase]:
    """Return what a schedule has a rank do."""
    builder = build_program_builder_from(CONFIG.validate_python(SCHEDULES[schedule]))
    return list(builder.compose(num_microbatches, pp_size)[rank])


def build_whole(num_stages: int, build_stage: BUILD_STAGE) -> nn.ModuleList:
    """Build all stages of a pipeline on one process."""
    return nn.ModuleList(build_stage(PipelineStageInfo(index, num_stages)) for index in range(num_stages))


# Inputs and outputs are of any type: each test has its own stages.
def run_whole(stages: Iterable[nn.Module], inputs: Any, shared: Any) -> Any:
    """Run one microbatch through all stages, in plain autograd."""
    for stage in stages:
        inputs = stage(inputs, shared)
    return inputs


@contextmanager
def told(note: str) -> Generator[None]:
    """Name the case in whatever goes wrong in the block, for loops over cases."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {note}")
        raise


# Transformer stages

VOCAB_SIZE, HIDDEN, NUM_HEADS = 13, 8, 2


@dataclass
class Carried:
    """What tree stages pass on: the hidden state among all else that models carry along."""

    hidden: torch.Tensor
    positions: torch.Tensor
    """Integers."""
    sums: dict[str, tuple[torch.Tensor, torch.Tensor]]
    """A penalty that grows from stage to stage, without a dimension, and a mask that no stage changes."""
    nothing: None = None
    scale: float = 0.5


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.norm_mlp = nn.RMSNorm(HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm_attention(x)).unflatten(-1, (3, NUM_HEADS, -1))  # (B, T, 3, H, D)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.dropout(self.out(attended))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


@dataclass(frozen=True, kw_only=True)
class TransformerStage:
    """Builds stages of a language model with one block each; equal ones on all processes."""

    dtype: torch.dtype = torch.float64
    is_tree: bool = False
    """Carry a tree over the boundaries, not only the hidden state."""
    dropout: float = 0.0
    is_checkpointed: bool = False
    compile_backend: str | None = None

    def __call__(self, info: PipelineStageInfo) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(100 + info.current_stage)
            stage = TransformerModule(info, self)
        return stage.to(self.dtype)


class TransformerModule(nn.Module):
    """A stage of `TransformerStage`: tokens (B, T) in, `shared` shifts the logits, logits (B, T, V) out."""

    def __init__(self, info: PipelineStageInfo, config: TransformerStage) -> None:
        super().__init__()
        self.info, self.config = info, config
        self.embed = nn.Embedding(VOCAB_SIZE, HIDDEN) if info.is_current_stage_first else None
        block = Block(config.dropout)
        self.block = torch.compile(block, backend=config.compile_backend) if config.compile_backend else block
        self.head = nn.Linear(HIDDEN, VOCAB_SIZE, bias=False) if info.is_current_stage_last else None

    def forward(self, inputs: Any, shared: float) -> Any:
        carried = self._enter(inputs) if self.embed is not None else inputs
        hidden = carried.hidden if self.config.is_tree else carried
        if self.config.dropout:
            # Ranks draw from generators of their own, a single process from one.
            torch.manual_seed(self.info.current_stage)
        hidden = (
            checkpoint(self.block, hidden, use_reentrant=False) if self.config.is_checkpointed else self.block(hidden)
        )
        if self.config.is_tree:
            carried = self._carry(carried, hidden)
        else:
            carried = hidden
        return self._leave(carried, shared) if self.head is not None else carried

    def _enter(self, tokens: torch.Tensor) -> Any:
        assert self.embed is not None
        hidden = self.embed(tokens)
        if not self.config.is_tree:
            return hidden
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)  # not contiguous
        return Carried(hidden, positions, {"parts": (hidden.new_zeros(()), tokens > 2)})

    @staticmethod
    def _carry(carried: Carried, hidden: torch.Tensor) -> Carried:
        penalty, mask = carried.sums["parts"]
        penalty = penalty + carried.scale * hidden.square().mean()
        return Carried(hidden + carried.positions.unsqueeze(-1), carried.positions, {"parts": (penalty, mask)})

    def _leave(self, carried: Any, shared: float) -> torch.Tensor:
        assert self.head is not None
        if not self.config.is_tree:
            return self.head(carried) + shared
        penalty, mask = carried.sums["parts"]
        return self.head(carried.hidden).masked_fill(mask.unsqueeze(-1), shared) + penalty

    def stage_transfer_spec(self, pipeline_input: torch.Tensor, boundary: StageBoundary) -> Any:
        shape = tuple(pipeline_input.shape)
        hidden = TensorSpec((*shape, HIDDEN), self.config.dtype)
        if not self.config.is_tree:
            return hidden
        parts = (TensorSpec((), self.config.dtype), TensorSpec(shape, torch.bool))
        return Carried(hidden, TensorSpec(shape, torch.int64), {"parts": parts})  # pyright: ignore[reportArgumentType]


class Pack(NamedTuple):
    """Microbatches of token ids with what each stage gets, and the label of each token."""

    inputs: tuple[torch.Tensor, ...]
    shared: tuple[float, ...]
    labels: tuple[torch.Tensor, ...]
    num_labels: int

    def loss(self, logits: torch.Tensor, index: int) -> torch.Tensor:
        """Return the share of a microbatch in the mean over all tokens of the pack."""
        total = F.cross_entropy(logits.flatten(0, 1), self.labels[index].flatten(), reduction="sum")
        return total / self.num_labels


@lru_cache
def build_pack(shapes: tuple[tuple[int, int], ...]) -> Pack:
    """Draw microbatches of the given batch sizes and lengths, the same on all processes."""
    generator = torch.Generator().manual_seed(7)
    tokens = [torch.randint(VOCAB_SIZE, (b, t + 1), generator=generator) for b, t in shapes]
    labels = tuple(each[:, 1:] for each in tokens)
    shared = tuple(0.1 * index for index in range(len(shapes)))
    return Pack(tuple(each[:, :-1] for each in tokens), shared, labels, sum(each.numel() for each in labels))


def uneven_shapes(num_microbatches: int) -> tuple[tuple[int, int], ...]:
    """Return batch sizes and lengths that differ within a pack."""
    return tuple(((2, 4), (1, 6), (3, 5))[index % 3] for index in range(num_microbatches))


class StepResult(NamedTuple):
    """A training step: losses by microbatch; gradients and parameters after it by stage and name."""

    losses: dict[int, torch.Tensor]
    gradients: dict[int, dict[str, torch.Tensor]]
    parameters: dict[int, dict[str, torch.Tensor]]


def optimizer_step(modules: dict[int, nn.Module], losses: dict[int, torch.Tensor]) -> StepResult:
    """Take the gradients, and one step of AdamW."""
    gradients = {
        stage: {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        for stage, module in modules.items()
    }
    # The step divides by |gradient| + eps: a large eps keeps it from blowing up the rounding of gradients near 0.
    parameters = [p for module in modules.values() for p in module.parameters()]
    torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3).step()
    after = {s: {name: p.detach().clone() for name, p in m.named_parameters()} for s, m in modules.items()}
    return StepResult(losses, gradients, after)


@lru_cache(maxsize=64)
def step_on_one_process(num_stages: int, stage: TransformerStage, shapes: tuple[tuple[int, int], ...]) -> StepResult:
    """Run a training step of the whole model in plain autograd, one microbatch after the other."""
    whole = build_whole(num_stages, stage)
    pack = build_pack(shapes)
    losses: dict[int, torch.Tensor] = {}
    for index, (tokens, shared) in enumerate(zip(pack.inputs, pack.shared, strict=True)):
        loss = pack.loss(run_whole(whole, tokens, shared), index)
        loss.backward()
        losses[index] = loss.detach()
    return optimizer_step(dict(enumerate(whole)), losses)


def step_on_pipeline(pipeline: Pipeline, shapes: tuple[tuple[int, int], ...]) -> StepResult:
    """Run the same step on a pipeline, and return what this rank has of it."""
    pack = build_pack(shapes)
    losses: dict[int, torch.Tensor] = {}

    def keep_loss(logits: torch.Tensor, index: int) -> torch.Tensor:
        loss = pack.loss(logits, index)
        assert index not in losses
        losses[index] = loss.detach()
        return loss

    pipeline.executor.step(pack.inputs, pack.shared, keep_loss)
    return optimizer_step(pipeline.modules, losses)


def part_of(whole: StepResult, pipeline: Pipeline) -> StepResult:
    """Return what a rank should have of a step: losses where the last stage is, the rest for its stages."""
    return StepResult(
        whole.losses if pipeline.has_last_stage else {},
        {stage: whole.gradients[stage] for stage in pipeline.modules},
        {stage: whole.parameters[stage] for stage in pipeline.modules},
    )


# Stages of one weight


class ScaleStage(nn.Module):
    """Multiplies by its weight, which is 1 at first: the pipeline is the identity."""

    def __init__(self, info: PipelineStageInfo) -> None:
        super().__init__()
        self.info = info
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, inputs: torch.Tensor, shared: Any) -> torch.Tensor:
        return inputs * self.weight

    def stage_transfer_spec(self, pipeline_input: torch.Tensor, boundary: StageBoundary) -> Any:
        return TensorSpec(tuple(pipeline_input.shape), torch.float64)


def numbered_inputs(shapes: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, ...]:
    """Fill the microbatches with their numbers, from 1."""
    return tuple(torch.full(shape, float(k), dtype=torch.float64) for k, shape in enumerate(shapes, start=1))


class ObserverJournal(BackwardObserver):
    """Writes down what an observer hears."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.microbatches: list[int] = []

    def before_microbatch(self, microbatch: int) -> None:
        self.microbatches.append(microbatch)

    def before_backward(self, stage: int, *, is_last: bool, is_split: bool) -> None:
        self.lines.append(f"{'last ' if is_last else ''}{'split ' if is_split else ''}pass of {stage}")

    def before_split_backward(self, stage: int) -> None:
        self.lines.append(f"first half of {stage}")

    def after_backward(self, stage: int, *, is_last: bool, is_split: bool) -> None:
        if is_last:
            self.lines.append(f"{stage} done{' by halves' if is_split else ''}")
