"""Native jobs that train tiny models of the catalogue on any mesh, and what is left of them: losses, weights, optimizer state."""

import dataclasses
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam, Muon, Optimizer
from torch.utils.data import Dataset

from d9d.loop.auto import AutoDataConfig, AutoDataProvider
from d9d.loop.control import (
    BuildForwardInputsContext,
    BuildForwardInputsResult,
    ComputeLossContext,
    ComputeLossResult,
    InitializeModelStageContext,
    InitializeModelStageResult,
    InitializeOptimizerStageContext,
    OptimizerProvider,
)
from d9d.loop.event.catalogue.train import EVENT_TRAIN_READY
from d9d.model_state.mapper.adapters import identity_mapper_from_module
from d9d.module.block.head import SequenceCausalLMHeadShared
from d9d.module.model.io import SequenceHeadShared, SequenceInput, SequenceShared
from d9d.module.parallelism.api import SequenceSharding
from d9d.pipelining.api import DeclaresTiedParameters
from d9d.pipelining.training import PipelinedOptimizer
from tests.d9d.loop.run import regression_job
from tests.d9d.loop.run.regression_job import Job, Task, build_job
from tests.d9d.module.model.catalogue import VOCAB
from tests.harness.parity import full
from tests.numerics import model_runs
from tests.numerics.model_runs import SCHEDULES, TOKENS, Layout

SAVED_AFTER, STEPS_AFTERWARDS = 3, 5
NUM_STEPS = SAVED_AFTER + STEPS_AFTERWARDS
GLOBAL_BATCH = 8

State = dict[str, torch.Tensor]
"""Whole weights and buffers by name, and whole states of optimizers by name and their own one."""


class OddModel(regression_job.Model):
    """Dimensions that are smaller than the number of ranks or no multiple of it, empty shards, a weight without gradients.

    That one must not decay: FSDP gives it zero gradients, and other layouts none at all, see `parallelize_fsdp`.
    """

    def __init__(self, dtype: torch.dtype, dropout: float) -> None:
        super().__init__(dtype, dropout)
        self.unused = nn.Parameter(torch.empty(5, dtype=dtype))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.uniform_(self.unused)


class TrainedMatrices(OddModel):
    """Its vectors are frozen."""

    def __init__(self, dtype: torch.dtype, dropout: float) -> None:
        super().__init__(dtype, dropout)
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.ndim == 2)


class UpFrozen(regression_job.Model):
    def __init__(self, dtype: torch.dtype, dropout: float) -> None:
        super().__init__(dtype, dropout)
        self.up.requires_grad_(False)


class DownFrozen(regression_job.Model):
    """A layer, and a part of another one."""

    def __init__(self, dtype: torch.dtype, dropout: float) -> None:
        super().__init__(dtype, dropout)
        self.down.requires_grad_(False)
        self.up.bias.requires_grad_(False)


class OddProvider(regression_job.Provider):
    def __init__(self, model: type[regression_job.Model], dtype: torch.dtype) -> None:
        super().__init__(dtype, dropout=0.0)
        self._model, self._model_dtype = model, dtype

    def initialize_model_stage(
        self, context: InitializeModelStageContext
    ) -> InitializeModelStageResult[regression_job.Model]:
        model = self._model(self._model_dtype, 0.0)
        return InitializeModelStageResult(model=model, state_mapper=identity_mapper_from_module(model))


def adam_that_decays_matrices(context: InitializeOptimizerStageContext) -> Optimizer:
    """Two groups, of which each stage has others."""
    parameters = [parameter for parameter in context.model.parameters() if parameter.requires_grad]
    matrices = {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": 0.1}
    vectors = {"params": [parameter for parameter in parameters if parameter.ndim == 1], "betas": (0.8, 0.9)}
    return Adam([matrices, vectors], lr=1e-3, eps=1e-4, amsgrad=True)


def muon(context: InitializeOptimizerStageContext) -> Optimizer:
    """What looks at whole matrices."""
    return Muon([parameter for parameter in context.model.parameters() if parameter.requires_grad], lr=MUON_RATE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """What is trained, and by what."""

    model: str | type[regression_job.Model]
    """Name in the catalogue, or one of odd shapes."""
    optimizer: dict[str, Any] | OptimizerProvider = dataclasses.field(
        default_factory=lambda: {"name": "adamw", "lr": 1e-3, "eps": 1e-4}
    )
    tied: bool = False
    tolerance: float | None = None
    """How close the training is, where it is not by what the dtype promises."""
    last_bits: int = 0
    """What is added to it, in last bits of the largest value of a tensor in bfloat16."""


MOVED = 10
"""How many tolerances the training must move a weight of each stage, so that another training would be seen."""
MUON_RATE, STOCHASTIC_RATE = 0.01, 0.15
MUON_TOLERANCE = STEPS_AFTERWARDS * MUON_RATE * math.sqrt(9 / 6) * 2**-8
"""Updates are orthogonal matrices in bfloat16, times the rate and a factor for the shape ``(9, 6)``: a rounding of each."""
ODD_SETS: dict[str, type[regression_job.Model]] = {
    "all trained": regression_job.Model,
    "up frozen": UpFrozen,
    "down frozen": DownFrozen,
}
"""What of the odd shapes is trained."""
SUBJECTS = {
    "qwen3 dense": Subject(model="qwen3 dense"),
    "qwen3 moe": Subject(model="qwen3 moe"),
    "llama": Subject(model="llama"),
    "deepseek v3": Subject(model="deepseek v3"),
    "tied": Subject(model="qwen3 dense", tied=True),
    "groups": Subject(model="qwen3 dense", optimizer=adam_that_decays_matrices),
    "odd shapes": Subject(model=regression_job.Model, optimizer={"name": "adamw", "lr": 0.05}),
    "odd shapes, sgd": Subject(
        model=OddModel, optimizer={"name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True}
    ),
    "odd shapes, groups": Subject(model=OddModel, optimizer=adam_that_decays_matrices),
    "odd shapes, stochastic adamw": Subject(
        model=OddModel,
        optimizer={"name": "stochastic_adamw", "lr": STOCHASTIC_RATE, "weight_decay": 0.0},
        tolerance=0.0,
        last_bits=STEPS_AFTERWARDS,  # shards draw other random numbers than whole tensors: one more apart after each step
    ),
    "odd shapes, muon": Subject(model=TrainedMatrices, optimizer=muon, tolerance=MUON_TOLERANCE),
    **{name: Subject(model=model, optimizer={"name": "adamw", "lr": 0.05}) for name, model in ODD_SETS.items()},
}


@dataclasses.dataclass
class Tokens:
    index: torch.Tensor
    ids: torch.Tensor


class TokenData(Dataset[Tokens]):
    def __getitem__(self, index: int) -> Tokens:
        generator = torch.Generator().manual_seed(index)
        return Tokens(torch.tensor(index), torch.randint(0, sum(VOCAB.values()), (TOKENS + 1,), generator=generator))

    def __len__(self) -> int:
        return GLOBAL_BATCH * NUM_STEPS


def collate(samples: Sequence[Tokens]) -> Tokens:
    return Tokens(torch.stack([each.index for each in samples]), torch.stack([each.ids for each in samples]))


class LanguageTask(Task):
    """Cuts sequences over context-parallel ranks."""

    def __init__(self, sharding: SequenceSharding) -> None:
        super().__init__(regression_job.unweighted)
        self._sharding = sharding

    # Any: what the decoders take and give.
    def build_forward_inputs(self, ctx: BuildForwardInputsContext[Any]) -> BuildForwardInputsResult[Any, Any, Any]:
        self.read.append(ctx.batch.index.tolist())
        ids, labels = (self._sharding.shard(part) for part in (ctx.batch.ids[:, :-1], ctx.batch.ids[:, 1:]))
        positions = self._sharding.position_ids(TOKENS).expand_as(ids)
        shared = SequenceHeadShared(
            sequence=SequenceShared(position_ids=positions), head=SequenceCausalLMHeadShared(labels=labels)
        )
        # In a pipeline, routers must know ahead what their losses count for.
        weight = torch.tensor(1.0)
        return BuildForwardInputsResult(
            input=SequenceInput(input_ids=ids), shared=shared, state=ctx.batch, loss_weight=weight
        )

    def compute_loss(self, ctx: ComputeLossContext[Any, Any]) -> ComputeLossResult:
        return ComputeLossResult(loss=ctx.pipeline_results.cross_entropy.mean(), loss_weight=None)


def build(subject: str, layout: Layout, dtype: torch.dtype, folder: Path, saved: Path, *, saves: bool) -> Job:
    checkpointing = {"save_dir": str(saved), "period_steps": SAVED_AFTER if saves else "disable"}
    trained = SUBJECTS[subject]
    if not isinstance(trained.model, str):
        return build_job(
            layout.mesh,
            folder,
            total_steps=NUM_STEPS,
            dtype=dtype,
            model_provider=OddProvider(trained.model, dtype),
            optimizer=trained.optimizer,
            overrides={"checkpointing": checkpointing},
        )
    sharding = SequenceSharding.of(layout.mesh.build())
    return build_job(
        layout.mesh,
        folder,
        total_steps=NUM_STEPS,
        model_provider=model_runs.Provider(trained.model, dtype, layout, tied=trained.tied),
        data_provider=AutoDataProvider(
            lambda context: TokenData(),
            collate,
            AutoDataConfig(global_batch_size=GLOBAL_BATCH, microbatch_size=2, num_workers=0, pin_memory=False),
        ),
        optimizer=trained.optimizer,
        task_class=lambda weight: LanguageTask(sharding),
        overrides={
            "pipelining": {"schedule": SCHEDULES[layout.schedule]},
            "checkpointing": checkpointing,
        },
    )


def state_of(job: Job) -> State:
    """Return the whole state of this rank's stages, that of a tied weight once. All ranks must call it."""
    state: State = {}
    trainer = job.trainer._state
    assert isinstance(trainer.optimizer, PipelinedOptimizer)
    for module, optimizer in zip(trainer.tracked_modules.modules, trainer.optimizer.by_stage.values(), strict=True):
        ties = module.tied_parameters() if isinstance(module, DeclaresTiedParameters) else {}
        state |= {ties.get(name, name): full(value.detach()).clone() for name, value in module.state_dict().items()}
        names = {parameter: ties.get(name, name) for name, parameter in module.named_parameters()}
        assert isinstance(optimizer, Optimizer)
        ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        for position, values in optimizer.state_dict()["state"].items():
            state |= {f"{ordered[position]} {key}": full(value).clone() for key, value in values.items()}
    return state


def train_and_save(subject: str, layout: Layout, dtype: torch.dtype, folder: Path) -> None:
    """Train to the end, and keep the checkpoint after some steps and the states there and at the end."""
    job = build(subject, layout, dtype, folder / "from", folder / "saved", saves=True)
    states: dict[int, State] = {}
    trainer = job.trainer._state

    def keep(state: Any) -> None:
        if trainer.schedule.current_step == SAVED_AFTER:
            states[SAVED_AFTER] = state_of(job)
        original(state)

    original, trainer.checkpointer.checkpoint_if_needed = trainer.checkpointer.checkpoint_if_needed, keep
    job.trainer.train()
    states[NUM_STEPS] = state_of(job)
    torch.save(states, folder / f"states-{dist.get_rank() if dist.is_initialized() else 0}.pt")


def forget_later_checkpoints(folder: Path) -> None:
    for path in (folder / "saved" / "job").iterdir():
        if path.name != f"save-{SAVED_AFTER}":
            shutil.rmtree(path)


def saved_states(folder: Path, step: int) -> State:
    """Return the whole state of all ranks after a step."""
    merged: State = {}
    for path in sorted(folder.glob("states-*.pt")):
        merged |= torch.load(path, weights_only=True)[step]
    return merged


def largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def last_bit(value: float) -> float:
    """Return the distance of neighbours of a value in bfloat16, which has 8 bits."""
    return 2.0 ** (math.frexp(value)[1] - 8)


def resume(subject: str, layout: Layout, dtype: torch.dtype, folder: Path, tolerance: float) -> None:
    """Resume on another mesh: the same state bit for bit, and the same training up to rounding."""
    place = folder / f"to-{layout.schedule}-{'-'.join(f'{name}-{degree}' for name, degree in layout.degrees.items())}"
    job = build(subject, layout, dtype, place, folder / "saved", saves=False)
    expected = saved_states(folder, SAVED_AFTER)
    found: list[State] = []
    job.trainer._state.event_bus.subscribe(EVENT_TRAIN_READY, lambda context: found.append(state_of(job)))
    job.trainer.train()
    (resumed,) = found
    assert resumed
    for name, value in resumed.items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(value, expected[name]), name
    if layout.mesh.pipeline_parallel == 1:
        assert resumed.keys() == expected.keys()
    at_end, last_bits = saved_states(folder, NUM_STEPS), SUBJECTS[subject].last_bits
    parameters = {
        name for module in job.trainer._state.tracked_modules.modules for name, _ in module.named_parameters()
    }
    farthest = 0.0
    for name, value in state_of(job).items():
        if name.startswith("unused "):
            continue  # of zero gradients, or of none
        start, end = expected[name], at_end[name]
        allowed = tolerance + last_bits * last_bit(max(largest(start), largest(end)))
        torch.testing.assert_close(value, end, rtol=0, atol=allowed, msg=lambda text, name=name: f"{name}: {text}")
        if name in parameters:
            farthest = max(farthest, largest(end.double() - start.double()) / allowed)
    assert farthest > MOVED
    if not dist.is_initialized() or dist.get_rank() == 0:
        straight = Job(job.trainer, job.task, folder / "from" / "log.jsonl").losses()
        losses = job.losses()
        assert list(losses) == list(range(SAVED_AFTER + 1, NUM_STEPS + 1))
        for step, loss in losses.items():
            assert abs(loss - straight[step]) <= tolerance + last_bits * last_bit(straight[step]), step
