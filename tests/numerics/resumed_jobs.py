"""Native jobs that train tiny models of the catalogue on any mesh, and what is left of them: losses, weights, optimizer state."""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from d9d.loop.auto import AutoDataConfig, AutoDataProvider
from d9d.loop.control import (
    BuildForwardInputsContext,
    BuildForwardInputsResult,
    ComputeLossContext,
    ComputeLossResult,
)
from d9d.loop.event.catalogue.train import EVENT_TRAIN_READY
from d9d.module.block.head import SequenceCausalLMHeadShared
from d9d.module.model.io import SequenceHeadShared, SequenceInput, SequenceShared
from d9d.pipelining.training import PipelinedOptimizer
from tests.d9d.loop.run.regression_job import Job, Task, build_job
from tests.d9d.module.model.catalogue import VOCAB
from tests.harness.parity import full, named_full_parameters
from tests.numerics.model_runs import SCHEDULES, TOKENS, Layout, Provider

SAVED_AFTER, STEPS_AFTERWARDS = 3, 5
NUM_STEPS = SAVED_AFTER + STEPS_AFTERWARDS
GLOBAL_BATCH = 8
ODD = "odd shapes"
"""The model of `regression_job`: dimensions that are smaller than the number of ranks or no multiple of it, empty shards."""

State = dict[str, torch.Tensor]
"""Whole weights by name, and whole states of optimizers by name and their own one."""


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
    # Any: what the decoders take and give.
    def build_forward_inputs(self, ctx: BuildForwardInputsContext[Any]) -> BuildForwardInputsResult[Any, Any, Any]:
        self.read.append(ctx.batch.index.tolist())
        ids, labels = ctx.batch.ids[:, :-1], ctx.batch.ids[:, 1:]
        positions = torch.arange(TOKENS).expand_as(ids)
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


def build(model: str, layout: Layout, dtype: torch.dtype, folder: Path, saved: Path, *, saves: bool) -> Job:
    checkpointing = {"save_dir": str(saved), "period_steps": SAVED_AFTER if saves else "disable"}
    if model == ODD:
        return build_job(
            layout.mesh, folder, total_steps=NUM_STEPS, dtype=dtype, overrides={"checkpointing": checkpointing}
        )
    return build_job(
        layout.mesh,
        folder,
        total_steps=NUM_STEPS,
        model_provider=Provider(model, dtype, layout),
        data_provider=AutoDataProvider(
            lambda context: TokenData(),
            collate,
            AutoDataConfig(global_batch_size=GLOBAL_BATCH, microbatch_size=2, num_workers=0, pin_memory=False),
        ),
        optimizer={"name": "adamw", "lr": 1e-3, "eps": 1e-4},
        task_class=LanguageTask,
        overrides={
            "pipelining": {"schedule": SCHEDULES[layout.schedule]},
            "checkpointing": checkpointing,
        },
    )


def state_of(job: Job) -> State:
    """Return the whole state of this rank's stages. All ranks must call it."""
    state: State = {}
    trainer = job.trainer._state
    assert isinstance(trainer.optimizer, PipelinedOptimizer)
    for module, optimizer in zip(trainer.tracked_modules.modules, trainer.optimizer.by_stage.values(), strict=True):
        state |= {name: value.clone() for name, value in named_full_parameters(module).items()}
        names = {parameter: name for name, parameter in module.named_parameters()}
        assert isinstance(optimizer, torch.optim.Optimizer)
        ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        for position, values in optimizer.state_dict()["state"].items():
            state |= {f"{ordered[position]} {key}": full(value).clone() for key, value in values.items()}
    return state


def train_and_save(model: str, layout: Layout, dtype: torch.dtype, folder: Path) -> None:
    """Train to the end, and keep the checkpoint after some steps and the states there and at the end."""
    job = build(model, layout, dtype, folder / "from", folder / "saved", saves=True)
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


def resume(model: str, layout: Layout, dtype: torch.dtype, folder: Path, tolerance: float) -> None:
    """Resume on another mesh: the same state bit for bit, and the same training up to rounding."""
    place = folder / f"to-{layout.schedule}-{'-'.join(f'{name}-{degree}' for name, degree in layout.degrees.items())}"
    job = build(model, layout, dtype, place, folder / "saved", saves=False)
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
    at_end = saved_states(folder, NUM_STEPS)
    for name, value in state_of(job).items():
        torch.testing.assert_close(
            value, at_end[name], rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        straight = Job(job.trainer, job.task, folder / "from" / "log.jsonl").losses()
        losses = job.losses()
        assert list(losses) == list(range(SAVED_AFTER + 1, NUM_STEPS + 1))
        for step, loss in losses.items():
            assert abs(loss - straight[step]) <= tolerance, step
