"""Resuming on another mesh with other parameters frozen, against plain PyTorch that freezes and unfreezes them at that step."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d.internals.materialize import materialize_module
from tests.d9d.loop.run.regression_job import BASE_SEED, GLOBAL_BATCH_SIZE, NUM_SAMPLES, Data
from tests.harness.parity import FP64_EXACT, named_full_parameters
from tests.harness.plugin import OnRanks
from tests.numerics.model_runs import Layout
from tests.numerics.resumed_jobs import NUM_STEPS, ODD_SETS, SAVED_AFTER, build, forget_later_checkpoints

LEARNING_RATE, MAX_NORM = 0.05, 0.5  # as in the job
LAYOUTS: dict[str, Layout] = {
    "1": Layout(degrees={}),
    "replicate 2": Layout(degrees={"data_parallel_replicate": 2}),
    "shard 2": Layout(degrees={"data_parallel_shard": 2}),
    "shard 4": Layout(degrees={"data_parallel_shard": 4}),
    "hsdp 2 x 2": Layout(degrees={"data_parallel_replicate": 2, "data_parallel_shard": 2}),
}
DEFAULT = ("up frozen", "down frozen", "shard 2", ["replicate 2"])
CHANGES = [("all trained", "up frozen"), ("up frozen", "all trained"), ("up frozen", "down frozen")]


def plain_training(before: str, afterwards: str) -> tuple[list[float], nn.Module]:
    """Each step on its whole batch; a new optimizer behind the break, with the state of what it still trains."""
    with torch.device("meta"):
        model = ODD_SETS[before](torch.float64, 0.0)
        then = {
            name for name, each in ODD_SETS[afterwards](torch.float64, 0.0).named_parameters() if each.requires_grad
        }
    materialize_module(model, torch.device("cpu"), BASE_SEED)
    optimizer = optimizer_of(model)
    data = Data(NUM_SAMPLES, torch.float64)
    losses: list[float] = []
    for step in range(NUM_STEPS):
        if step == SAVED_AFTER:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in then)
                parameter.grad = None
            state = optimizer.state
            optimizer = optimizer_of(model)
            optimizer.state.update({each: state[each] for each in trained(model) if each in state})
        samples = slice(step * GLOBAL_BATCH_SIZE, (step + 1) * GLOBAL_BATCH_SIZE)
        loss = (model(data.x[samples], None) - data.y[samples]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained(model), MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * (1.0 - 0.9 * step / NUM_STEPS)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=LEARNING_RATE)


def train_and_save(subject: str, layout: Layout, folder: Path) -> None:
    build(subject, layout, torch.float64, folder / "from", folder / "saved", saves=True).trainer.train()


def go_on(before: str, afterwards: str, layout: Layout, folder: Path, name: str) -> None:
    job = build(afterwards, layout, torch.float64, folder / name, folder / "saved", saves=False)
    job.trainer.train()
    losses, model = plain_training(before, afterwards)
    expected = dict(model.named_parameters())
    for name, value in named_full_parameters(job.model).items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=FP64_EXACT, msg=name)
    if not dist.is_initialized() or dist.get_rank() == 0:
        found = job.losses()
        assert list(found) == list(range(SAVED_AFTER + 1, NUM_STEPS + 1))
        assert list(found.values()) == pytest.approx(losses[SAVED_AFTER:], rel=0, abs=FP64_EXACT)


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(
    ("before", "afterwards", "saved", "resumed"),
    [
        pytest.param(*DEFAULT, id="default"),
        *(
            pytest.param(
                before,
                afterwards,
                saved,
                list(LAYOUTS),
                id=f"{before}, {afterwards}, {saved}",
                marks=pytest.mark.exhaustive,
            )
            for before, afterwards in CHANGES
            for saved in LAYOUTS
        ),
    ],
)
def test_other_parameters_are_trained(
    tmp_path: Path, on_ranks: OnRanks, before: str, afterwards: str, saved: str, resumed: list[str]
):
    layout = LAYOUTS[saved]
    on_ranks(layout.mesh.world_size, train_and_save, subject=before, layout=layout, folder=tmp_path)
    forget_later_checkpoints(tmp_path)
    for name in resumed:
        other = LAYOUTS[name]
        on_ranks(
            other.mesh.world_size,
            go_on,
            before=before,
            afterwards=afterwards,
            layout=other,
            folder=tmp_path,
            name=name,
        )
