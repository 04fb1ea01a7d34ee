"""Weights, optimizers and schedules from checkpoints of other cuts, of other models, and with other things trained."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

from d9d.checkpoint import (
    CheckpointContents,
    CheckpointFolder,
    CheckpointSaver,
    OnChangedParameters,
    load_state,
    read_metadata,
)
from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.core.participants import Participants
from d9d.internals.stage_names import agree_on_names
from d9d.loop.component.stage_schedules import StageSchedules
from d9d.loop.component.tracked_modules import StatefulPredicate, TrackedModules, everything, only_trainable
from d9d.loop.component.trained_state import TrainedState
from d9d.optim import localize_optimizer
from d9d.pipelining.training import PipelinedLRScheduler, PipelinedOptimizer
from tests.harness.parity import full

LOGGER = logging.getLogger("test")


class Stage(nn.Module):
    """Some layers of a model, by any names, with a table that each stage has."""

    def __init__(self, *names: str, table: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(2, 2, dtype=torch.float64) for name in names})
        self.register_buffer("table", torch.full((3,), table))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


class Job:
    """Stages on one rank, which is as good as any number of ranks where nothing is sent."""

    def __init__(
        self,
        *modules: nn.Module,
        lr: float = 0.1,
        on_changed: OnChangedParameters = "raise",
        is_saved: StatefulPredicate = everything,
        build: Callable[[list[nn.Parameter], float], Optimizer] = lambda parameters, lr: AdamW(parameters, lr=lr),
        schedule: Callable[[Optimizer], Any] = lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    ) -> None:
        self.modules = modules
        self.optimizers = [build([p for p in m.parameters() if p.requires_grad], lr) for m in modules]
        self.schedules = [schedule(optimizer) for optimizer in self.optimizers]
        stages = range(len(modules))
        self.state = TrainedState(
            agree_on_names(modules, stages, None),
            modules,
            self.optimizers,
            StageSchedules(stages, self.optimizers, self.schedules),
            is_saved,
            [[stage] for stage in stages],
            on_changed,
        )

    def train(self, num_steps: int = 2) -> "Job":
        for _ in range(num_steps):
            x = torch.linspace(-1, 1, 6, dtype=torch.float64).view(3, 2)
            for module in self.modules:
                x = module(x)
            x.square().sum().backward()
            for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        return self

    def save(self, folder: Path) -> "Job":
        CheckpointSaver(CheckpointFolder(folder, LOGGER), Participants()).save({"state": self.state.state_dict()}, 1)
        return self

    def load(self, folder: Path, group: dist.ProcessGroup | None = None) -> list[str]:
        path = folder / "save-1"
        contents = CheckpointContents(path, read_metadata(path), "state")
        wanted = {"state": self.state.prepare_to_load(contents)}
        loaded = load_state(
            path,
            wanted,
            group,
            metadata=contents.metadata,
            may_be_left=lambda key: self.state.may_be_left(key.removeprefix("state.")),
        )
        return self.state.load_state_dict(loaded["state"])

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for module in self.modules for name, value in module.named_parameters()}


def check_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


CUTS: list[Sequence[Sequence[str]]] = [["0123"], ["01", "23"], ["0", "12", "3"], ["0", "1", "2", "3"]]


@pytest.mark.parametrize("saved", CUTS)
@pytest.mark.parametrize("loaded", CUTS)
def test_any_cut_goes_on_where_another_was(tmp_path: Path, saved: Sequence[str], loaded: Sequence[str]):
    first = Job(*(Stage(*names) for names in saved)).train().save(tmp_path)
    second = Job(*(Stage(*names) for names in loaded))
    assert second.load(tmp_path) == []
    check_equal(second.weights(), first.weights())
    check_equal(second.train().weights(), first.train().weights())
    assert second.optimizers[-1].param_groups[0]["lr"] == pytest.approx(0.1 / 5)


def test_names_of_stages_go_on_in_as_many_stages_and_are_refused_in_others(tmp_path: Path):
    first = Job(Stage("a", "b"), Stage("a", "b")).train().save(tmp_path)
    second = Job(Stage("a", "b"), Stage("a", "b"))
    second.load(tmp_path)
    for one, other in zip(first.modules, second.modules, strict=True):
        check_equal(dict(one.named_parameters()), dict(other.named_parameters()))
    refusal = (
        r"host stages 0 \| 1, those of this job 0, and these names mean different tensors in different stages: "
        r"layers\.a\.bias, layers\.a\.weight, layers\.b\.bias"
    )
    with pytest.raises(ValueError, match=refusal):
        Job(Stage("a", "b")).load(tmp_path)
    with pytest.raises(ValueError, match=r"host stages 0 \| 1, those of this job 0 \| 1 \| 2"):
        Job(Stage("a", "b"), Stage("a", "b"), Stage("a", "b")).load(tmp_path)
    with pytest.raises(ValueError, match=r"stage 1: layers\.b\.weight, and the job"):
        Job(Stage("a", "b"), Stage("a")).load(tmp_path)
    Job(Stage("a", "b"), Stage("a")).save(tmp_path / "mirrored")
    with pytest.raises(ValueError, match=r"different stages: layers\.b\.bias, layers\.b\.weight"):
        Job(Stage("a"), Stage("a", "b")).load(tmp_path / "mirrored")
    Job(Stage("a", "b")).save(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"host stages 0, those of this job 0 \| 1, .*layers\.a\.bias"):
        Job(Stage("a", "b"), Stage("a", "b")).load(tmp_path / "whole")


def test_a_table_that_each_stage_has_must_be_the_same_in_all(tmp_path: Path):
    Job(Stage("0", table=2.0), Stage("1", table=2.0)).save(tmp_path / "same")
    whole = Stage("0", "1")
    Job(whole).load(tmp_path / "same")
    assert whole.get_buffer("table").eq(2).all()
    Job(Stage("0", table=2.0), Stage("1", table=3.0)).save(tmp_path / "different")
    with pytest.raises(ValueError, match="these names mean different tensors in different stages: table"):
        Job(whole).load(tmp_path / "different")
    stages = [Stage("0"), Stage("1")]
    Job(*stages).load(tmp_path / "different")
    assert [stage.get_buffer("table")[0] for stage in stages] == [2.0, 3.0]


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 2, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x)

    def tied_parameters(self) -> Mapping[str, str]:
        return {"embed.weight": "embedding"}


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def tied_parameters(self) -> Mapping[str, str]:
        return {"head.weight": "embedding"}


class Whole(nn.Module):
    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embed, self.head = Embedding().embed, Head().head
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def test_tied_weights_are_saved_once_and_found_by_any_of_their_names(tmp_path: Path):
    whole = Job(Whole()).train().save(tmp_path / "whole")
    names = [name for name in read_metadata(tmp_path / "whole" / "save-1").state_dict_metadata if "weight" in name]
    assert sorted(names) == [
        "state.model.embed.weight",
        *(f"state.optimizer.state.embed.weight.{name}" for name in ("exp_avg", "exp_avg_sq", "step")),
    ]
    stages = Job(Embedding(), Head())
    stages.load(tmp_path / "whole")
    (moments,) = whole.optimizers[0].state.values()
    for module, optimizer in zip(stages.modules, stages.optimizers, strict=True):
        (parameter,) = module.parameters()
        assert torch.equal(parameter, whole.modules[0].get_parameter("embed.weight"))
        assert torch.equal(optimizer.state[parameter]["exp_avg"], moments["exp_avg"])
    stages.save(tmp_path / "stages")
    again = Job(Whole())
    again.load(tmp_path / "stages")
    check_equal(again.weights(), whole.weights())
    check_equal(again.train().weights(), whole.train().weights())


def test_copies_of_a_tied_weight_have_state_of_their_own_after_a_resume(tmp_path: Path):
    """Both copies may be on one rank, each with an optimizer that steps in place."""

    def step(job: Job, gradient: float) -> list[torch.Tensor]:
        for module, optimizer in zip(job.modules, job.optimizers, strict=True):
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
        return list(job.weights().values())

    first = Job(Embedding(), Head())
    first.modules[1].load_state_dict({"head.weight": first.modules[0].get_parameter("embed.weight")})
    step(first, 1.0)
    first.save(tmp_path)
    second = Job(Embedding(), Head())
    second.load(tmp_path)
    for gradient in (2.0, -3.0):
        embed, head = step(second, gradient)
        assert torch.equal(embed, head)
        assert torch.equal(embed, step(first, gradient)[0])


def test_weights_that_became_one_are_refused_unless_they_are_equal(tmp_path: Path):
    apart = Job(Whole(is_tied=False)).save(tmp_path / "apart")
    with pytest.raises(ValueError, match=r"embed\.weight and head\.weight differ there, and are one weight in the job"):
        Job(Whole()).load(tmp_path / "apart")
    with torch.no_grad():
        apart.modules[0].get_parameter("head.weight").copy_(apart.modules[0].get_parameter("embed.weight"))
    apart.save(tmp_path / "equal")
    Job(Whole()).load(tmp_path / "equal")


def frozen(*frozen_names: str) -> Stage:
    stage = Stage("0", "1")
    for name in frozen_names:
        stage.layers[name].requires_grad_(False)
    return stage


@pytest.mark.parametrize("is_saved", [everything, only_trainable])
def test_parameters_may_be_frozen_later(tmp_path: Path, is_saved: StatefulPredicate):
    first = Job(frozen(), is_saved=is_saved).train().save(tmp_path)
    second = Job(frozen("1"), is_saved=is_saved)
    assert second.load(tmp_path) == [
        "trained before, and not now; their state of the optimizer is left out: layers.1.bias, layers.1.weight"
    ]
    check_equal(second.weights(), first.weights())
    second.train()
    assert torch.equal(second.weights()["layers.1.weight"], first.weights()["layers.1.weight"])


def test_what_was_trained_before_and_buffers_stay_in_checkpoints_of_what_is_trained(tmp_path: Path):
    first = Job(frozen("1"), is_saved=only_trainable).train()
    first.modules[0].get_buffer("table").fill_(5)
    first.save(tmp_path / "1")
    second = Job(frozen("0"), is_saved=only_trainable, on_changed="allow")
    second.load(tmp_path / "1")
    second.train().save(tmp_path / "2")
    third = Job(frozen("0", "1"), is_saved=only_trainable, build=lambda _, lr: torch.optim.SGD([{"params": []}], lr=lr))
    third.load(tmp_path / "2")
    check_equal(third.weights(), second.weights())
    check_equal(
        {name: value for name, value in third.weights().items() if ".0." in name},
        {name: value for name, value in first.weights().items() if ".0." in name},
    )
    assert third.modules[0].get_buffer("table").eq(5).all()
    # What was never trained is left out.
    names = read_metadata(tmp_path / "1" / "save-1").state_dict_metadata
    assert not [name for name in names if name.startswith("state.model.layers.1")]


def test_parameters_may_be_unfrozen_later(tmp_path: Path):
    first = Job(frozen("1")).train().save(tmp_path)
    second = Job(frozen())
    assert second.load(tmp_path) == [
        "trained now, and not before; they start without state of the optimizer: layers.1.bias, layers.1.weight"
    ]
    check_equal(second.weights(), first.weights())
    (optimizer,) = second.optimizers
    assert len(optimizer.state) == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 3)
    second.train()
    assert len(optimizer.state) == 4


def test_a_stage_that_was_frozen_trains_at_the_learning_rate_of_the_schedule(tmp_path: Path):
    def with_placeholder(parameters: list[nn.Parameter], lr: float) -> Optimizer:
        return AdamW(parameters, lr=lr) if parameters else torch.optim.SGD([{"params": []}])

    modules = [Stage("0"), Stage("1")]
    modules[0].requires_grad_(False)
    Job(*modules, build=with_placeholder).train().save(tmp_path)
    for second in (Job(Stage("0"), Stage("1"), build=with_placeholder), Job(Stage("0", "1"), build=with_placeholder)):
        second.load(tmp_path)
        second.train(1)
        # 2 steps before and one now: the fourth multiplier.
        assert [optimizer.param_groups[0]["lr"] for optimizer in second.optimizers] == pytest.approx(
            [0.1 / 4] * len(second.optimizers)
        )


def test_an_added_parameter_is_named_unless_that_is_asked_for(tmp_path: Path):
    first = Job(Stage("0")).train().save(tmp_path)
    with pytest.raises(ValueError, match=r"state\.model\.layers\.1\.weight is not in it"):
        Job(Stage("0", "1")).load(tmp_path)
    second = Job(Stage("0", "1"), on_changed="allow")
    before = second.weights()
    told = second.load(tmp_path)
    assert (
        "the job has, and the checkpoint does not hold; they keep their first values: layers.1.bias, layers.1.weight"
        in told
    )
    check_equal(second.weights(), {**before, **first.weights()})


def test_a_removed_parameter_is_named_unless_that_is_asked_for(tmp_path: Path):
    first = Job(Stage("0", "1")).train().save(tmp_path)
    removed = (
        r"(?s)state\.model\.layers\.1\.weight, and the job.*state\.optimizer\.state\.layers\.1\.weight\.exp_avg, and"
    )
    with pytest.raises(ValueError, match=removed):
        Job(Stage("0")).load(tmp_path)
    second = Job(Stage("0"), on_changed="allow")
    assert second.load(tmp_path) == ["the checkpoint holds, and the job has not: layers.1.bias, layers.1.weight"]
    check_equal(second.weights(), {name: first.weights()[name] for name in second.weights()})


def test_an_entry_that_came_later_is_named(tmp_path: Path):
    job = Job(Stage("0"))
    job.modules[0].register_buffer("late", torch.zeros(1))
    with pytest.raises(ValueError, match=r"has got entries since the job was configured, .*: late"):
        job.save(tmp_path)


def test_state_that_is_missing_in_part_is_an_error(tmp_path: Path):
    first = Job(Stage("0")).train()
    state = first.state.state_dict()
    del state["optimizer"]["state"]["layers.0.weight"]["exp_avg"]
    CheckpointSaver(CheckpointFolder(tmp_path, LOGGER), Participants()).save({"state": state}, 1)
    with pytest.raises(ValueError, match=r"optimizer\.state\.layers\.0\.weight\.exp_avg is not in it, though"):
        Job(Stage("0")).load(tmp_path)


def test_a_changed_learning_rate_loses_against_the_checkpoint_and_that_is_told(tmp_path: Path):
    first = Job(Stage("0")).train().save(tmp_path)
    second = Job(Stage("0"), lr=0.7)
    assert second.load(tmp_path) == ["lr of group 0 of the optimizer: 0.1 of the checkpoint wins over 0.7 of the job"]
    for _ in range(5):  # also when the schedule goes on
        assert second.optimizers[0].param_groups[0]["lr"] == first.optimizers[0].param_groups[0]["lr"]
        first.train(1)
        second.train(1)


def test_schedules_that_differ_between_stages_cannot_go_on_in_others(tmp_path: Path):
    first = Job(Stage("0"), Stage("1"), schedule=lambda optimizer: StepLR(optimizer, 5)).train()
    first.schedules[1].gamma = 0.5
    first.save(tmp_path)
    Job(Stage("0"), Stage("1"), schedule=lambda optimizer: StepLR(optimizer, 5)).load(tmp_path)
    with pytest.raises(ValueError, match=r"schedules of the stages in the checkpoint differ in gamma.*\[0\.1, 0\.5\]"):
        Job(Stage("0", "1"), schedule=lambda optimizer: StepLR(optimizer, 5)).load(tmp_path)


def test_lists_of_groups_need_as_many_groups(tmp_path: Path):
    def two_groups(parameters: list[nn.Parameter], lr: float) -> Optimizer:
        return AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=lr)

    def plateau(optimizer: Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    Job(Stage("0", "1"), schedule=plateau).save(tmp_path)
    with pytest.raises(ValueError, match=r"have a list .* of 1 values.* Here are 2 groups"):
        Job(Stage("0", "1"), build=two_groups, schedule=plateau).load(tmp_path)


class WithNumber(AdamW):
    """Has state of its own, of no parameter."""

    number = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "number": self.number}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.number = state_dict.pop("number")
        super().load_state_dict(state_dict)


def test_state_of_no_parameter_is_that_of_the_stage_or_of_all(tmp_path: Path):
    first = Job(Stage("0"), Stage("1"), build=WithNumber)
    for optimizer in first.optimizers:
        optimizer.number = 3.0
    first.save(tmp_path / "same")
    second = Job(Stage("0", "1"), build=WithNumber)
    second.load(tmp_path / "same")
    assert second.optimizers[0].number == 3.0
    first.optimizers[1].number = 4.0
    first.save(tmp_path / "different")
    third = Job(Stage("0"), Stage("1"), build=WithNumber)
    third.load(tmp_path / "different")
    assert [optimizer.number for optimizer in third.optimizers] == [3.0, 4.0]
    with pytest.raises(ValueError, match="the optimizers of the stages differ there in number"):
        second.load(tmp_path / "different")


def test_another_optimizer_is_refused_before_anything_is_changed(tmp_path: Path):
    Job(Stage("0")).train().save(tmp_path)
    second = Job(Stage("0"), build=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr))
    before = second.weights()
    with pytest.raises(ValueError, match=r"optimizer of layers\.0\.weight is AdamW there, and SGD in the job"):
        second.load(tmp_path)
    check_equal(second.weights(), before)


@pytest.mark.world_size(2)
def test_buffers_are_all_those_of_the_first_replica(tmp_path: Path):
    """Statistics of replicas differ, and a mean of one with a variance of another belongs to no model."""
    context = DeviceMeshParameters(data_parallel_replicate=2).build()
    module = nn.BatchNorm1d(4)
    for _, buffer in module.named_buffers():
        buffer.fill_(dist.get_rank() + 7)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state = TrainedState.of_job(
        context,
        TrackedModules(context, [module], everything),
        PipelinedOptimizer(None, [optimizer]),
        PipelinedLRScheduler(None, [LambdaLR(optimizer, lambda step: 1.0)]),
        [[0]],
        "raise",
    )
    group = dist.group.WORLD
    assert group is not None
    folder = CheckpointFolder(tmp_path, LOGGER)
    CheckpointSaver(folder, Participants([group])).save({"state": state.state_dict()}, 1)
    saved = {f"state.model.{name}": torch.zeros_like(value) for name, value in module.state_dict().items()}
    load_state(tmp_path / "save-1", saved, group, may_be_left=lambda key: True)
    check_equal(
        {name: value for name, value in saved.items() if "running" in name},
        {f"state.model.running_{name}": torch.full((4,), 7.0) for name in ("mean", "var")},
    )
    assert saved["state.model.num_batches_tracked"] == 7


def sharded() -> nn.Module:
    module = nn.Linear(6, 5, bias=False, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.arange(30.0).view(5, 6) / 30)
    mesh = DeviceMeshParameters(data_parallel_shard=2).build().mesh_for(DENSE_DOMAIN)
    return fully_shard(module, mesh=mesh["dp_cp_shard"])


def step_on_whole(job: Job) -> torch.Tensor:
    (module,) = job.modules
    module(torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)).square().sum().backward()
    job.optimizers[0].step()
    job.optimizers[0].zero_grad()
    return full(next(module.parameters())).clone()


@pytest.mark.world_size(2)
def test_an_optimizer_that_looks_at_whole_matrices(tmp_path: Path):
    """It runs on DTensors, and so must find its state as such."""

    def build(parameters: list[nn.Parameter], lr: float) -> Optimizer:
        optimizer = torch.optim.Muon(parameters, lr=lr)
        assert not localize_optimizer(optimizer)
        return optimizer

    group = dist.group.WORLD
    assert group is not None
    first = Job(sharded(), build=build)
    step_on_whole(first)
    saver = CheckpointSaver(CheckpointFolder(tmp_path, LOGGER), Participants([group]))
    saver.save({"state": first.state.state_dict()}, 1)
    second = Job(sharded(), build=build)
    second.load(tmp_path, group)
    for _ in range(2):
        assert torch.equal(step_on_whole(second), step_on_whole(first))
