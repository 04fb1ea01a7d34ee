"""Ties over stages: the same steps on one process with one weight, and what is refused."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters, DistributedContext
from d9d.core.dist_ops import all_gather_object
from d9d.core.types import TensorSpec
from d9d.internals.grad_sync import GradientSynchronizer
from d9d.internals.materialize import materialize_module
from d9d.internals.tied_parameters import (
    StageMemory,
    TiedGradients,
    TiedParameters,
    TiedWeight,
    agree_on_ties,
    tie_parameters,
)
from d9d.loop.component.gradient_clipper import GradientClipper
from d9d.loop.component.gradient_manager import GradientManager
from d9d.loop.component.model_stage import ModelStageFactory
from d9d.loop.component.tracked_modules import TrackedModules
from d9d.loop.config import GradientClippingConfig, GradientManagerConfig, ModelStageFactoryConfig, PipeliningConfig
from d9d.loop.control import (
    InitializeModelStageContext,
    InitializeModelStageResult,
    ModelProvider,
    ParallelizeModelStageContext,
)
from d9d.module.parallelism.api import parallelize_fsdp, parallelize_hsdp, parallelize_replicate
from d9d.optim import localize_optimizer
from d9d.pipelining.api import PipelineStageInfo, StageBoundary
from d9d.pipelining.factory import PipelineScheduleInfo
from tests.harness.parity import FP64_EXACT, full
from tests.harness.pipelines import SCHEDULES, told

NUM_ROWS, WIDTH, NUM_TOKENS = 7, 6, 5
"""An odd number of rows, so that shards are uneven."""
NUM_STEPS, NUM_MICROBATCHES, MICROBATCH_SIZE = 5, 4, 2
MAX_NORM = 0.1
"""Below the norms of all steps."""

CPU = torch.device("cpu")


class Table(nn.Module):
    """A weight whose first values depend on the stage, so that a copy has other ones until it is tied."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.weight = nn.Parameter(torch.empty(NUM_ROWS, WIDTH, dtype=torch.float64))

    def reset_parameters(self) -> None:
        generator = torch.Generator().manual_seed(self.stage)
        with torch.no_grad():
            self.weight.copy_(torch.randn(NUM_ROWS, WIDTH, dtype=torch.float64, generator=generator))


class Stage(nn.Module):
    """Embeds on the first stage and classifies on the last one, with copies of the tables that `ties` names by key."""

    def __init__(self, info: PipelineStageInfo, ties: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.info = info
        here = [key for key, stages in ties.items() if info.current_stage in stages]
        self.tables = nn.ModuleDict({key: Table(info.current_stage) for key in here})
        is_end = info.is_current_stage_first or info.is_current_stage_last
        self.own = Table(info.current_stage) if is_end and "tokens" not in here else None
        self.mix = nn.ModuleDict({str(info.current_stage): nn.Linear(WIDTH, WIDTH, dtype=torch.float64)})

    @property
    def vocabulary(self) -> torch.Tensor:
        table = self.tables["tokens"] if self.own is None else self.own
        return table.weight

    def forward(self, inputs: torch.Tensor, shared: None) -> torch.Tensor:
        x = F.embedding(inputs, self.vocabulary) if self.info.is_current_stage_first else inputs
        for table in self.tables.values():
            x = x + torch.softmax(x @ table.weight.T, -1) @ table.weight
        for mix in self.mix.values():
            x = x + torch.tanh(mix(x))
        return x @ self.vocabulary.T if self.info.is_current_stage_last else x

    def stage_transfer_spec(self, pipeline_input: torch.Tensor, boundary: StageBoundary) -> Any:
        return TensorSpec((*pipeline_input.shape, WIDTH), torch.float64)

    def tied_parameters(self) -> dict[str, str]:
        return {f"tables.{key}.weight": key for key in self.tables}

    def reset_parameters(self) -> None:
        for module in (*self.tables.values(), *self.mix.values(), self.own):
            if module is not None:
                module.reset_parameters()


class Provider(ModelProvider[Any]):
    def __init__(self, build: Callable[[PipelineStageInfo], nn.Module]) -> None:
        self.build = build

    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[Any]:
        return InitializeModelStageResult(model=self.build(context.stage), state_mapper=None)

    def parallelize_model_stage(self, context: ParallelizeModelStageContext[Any]) -> None:
        degrees = context.dist_context.mesh_params
        mesh = context.dist_context.mesh_for(DENSE_DOMAIN)
        if degrees.has_data_parallel_shard:
            parallelize_fsdp(context.model, mesh["dp_cp_shard"])
        elif degrees.has_data_parallel_replicate:
            parallelize_replicate(context.model, mesh["dp_replicate"])


def build_stages(
    context: DistributedContext, schedule: str, build: Callable[[PipelineStageInfo], nn.Module]
) -> tuple[PipelineScheduleInfo[Any, Any, Any], TrackedModules]:
    pipelining = PipeliningConfig.model_validate({"schedule": SCHEDULES[schedule]})
    return ModelStageFactory(
        Provider(build), context, ModelStageFactoryConfig(), pipelining, seed=3
    ).build_pipeline_and_modules()


@dataclasses.dataclass
class Step:
    loss: torch.Tensor
    norm: torch.Tensor
    parameters: dict[int, dict[str, torch.Tensor]]
    """Whole parameters by stage and name."""


class Job:
    """What a training loop does with a pipeline."""

    def __init__(self, context: DistributedContext, schedule: str, ties: dict[str, tuple[int, ...]]) -> None:
        self.context = context
        self.num_stages = 0
        self.stages: list[int] = []
        self.pipeline, self.tracked = build_stages(context, schedule, lambda info: self._stage(info, ties))
        self.manager = GradientManager(context, self.tracked, GradientManagerConfig())
        self.clipper = GradientClipper(context, self.manager, GradientClippingConfig(max_norm=MAX_NORM))
        self.optimizers = [optimizer_of(module) for module in self.tracked.modules]
        for optimizer in self.optimizers:
            localize_optimizer(optimizer)
        self.pipeline.schedule.set_backward_observer(self.manager)

    def _stage(self, info: PipelineStageInfo, ties: dict[str, tuple[int, ...]]) -> Stage:
        self.num_stages = info.num_stages
        self.stages.append(info.current_stage)
        return Stage(info, ties)

    def step(self, index: int) -> Step:
        own = samples(index, self.context.dp_size).chunk(self.context.dp_size)[self.context.dp_rank]
        pack = own.split(MICROBATCH_SIZE)
        self.manager.set_required_accumulations(len(pack))
        self.pipeline.schedule.step(
            tuple(x[:, :-1] for x in pack),
            (None,) * len(pack),
            lambda logits, number: self.manager.add_loss_with_weight(loss_of(logits, pack[number]), None),
        )
        self.manager.sync_and_scale()
        norm = self.clipper.clip()
        for optimizer in self.optimizers:
            optimizer.step()
        loss = self.manager.compute_global_loss()
        self.manager.zero_grad()
        return Step(loss, norm, named(dict(zip(self.stages, self.tracked.modules, strict=True))))


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    # The step divides by |gradient| + eps: a large eps keeps it from blowing up the rounding of gradients near 0.
    return torch.optim.AdamW(module.parameters(), lr=0.05, eps=1e-3)


def samples(step: int, dp_size: int) -> torch.Tensor:
    size = (dp_size * NUM_MICROBATCHES * MICROBATCH_SIZE, NUM_TOKENS + 1)
    return torch.randint(NUM_ROWS, size, generator=torch.Generator().manual_seed(100 + step))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def named(modules: dict[int, nn.Module]) -> dict[int, dict[str, torch.Tensor]]:
    return {
        stage: {name: full(p.detach()).clone() for name, p in module.named_parameters(remove_duplicate=False)}
        for stage, module in modules.items()
    }


def whole_model(num_stages: int, ties: dict[str, tuple[int, ...]]) -> nn.ModuleList:
    """Build all stages with one parameter for each tied weight."""
    model = nn.ModuleList(Stage(PipelineStageInfo(index, num_stages), ties) for index in range(num_stages))
    for stage in model:
        materialize_module(stage, CPU, seed=3)
    for key, stages in ties.items():
        for other in stages[1:]:
            model[other].tables[key].weight = model[stages[0]].tables[key].weight
    return model


def steps_on_one_process(num_stages: int, ties: dict[str, tuple[int, ...]], dp_size: int) -> list[Step]:
    model = whole_model(num_stages, ties)
    optimizer = optimizer_of(model)
    steps: list[Step] = []
    for index in range(NUM_STEPS):
        tokens = samples(index, dp_size)
        x = tokens[:, :-1]
        for stage in model:
            x = stage(x, None)
        loss = loss_of(x, tokens)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        steps.append(Step(loss.detach(), norm, named(dict(enumerate(model)))))
    return steps


def everywhere(own: dict[int, dict[str, torch.Tensor]], context: DistributedContext) -> dict[int, dict[str, Any]]:
    """Collect the stages of all ranks of the pipeline."""
    return {stage: named for part in all_gather_object(own, context.pipeline_group) for stage, named in part.items()}


def check_parity(schedule: str, ties: dict[str, tuple[int, ...]], **degrees: int) -> None:
    context = DeviceMeshParameters(**degrees).build()
    job = Job(context, schedule, ties)
    expected = steps_on_one_process(job.num_stages, ties, context.dp_size)
    with job.manager.install():
        for index, step in enumerate(expected):
            actual = job.step(index)
            with told(f"step {index}"):
                assert step.norm > MAX_NORM
                torch.testing.assert_close(actual.loss, step.loss, rtol=FP64_EXACT, atol=FP64_EXACT)
                torch.testing.assert_close(actual.norm, step.norm, rtol=FP64_EXACT, atol=FP64_EXACT)
            stages = everywhere(actual.parameters, context)
            assert stages.keys() == step.parameters.keys()
            for stage, parameters in stages.items():
                for name, value in parameters.items():
                    with told(f"step {index}, stage {stage}, {name}"):
                        torch.testing.assert_close(
                            value, step.parameters[stage][name], rtol=FP64_EXACT, atol=FP64_EXACT
                        )
            for key, (first, *others) in ties.items():
                for other in others:
                    name = f"tables.{key}.weight"
                    assert torch.equal(stages[first][name], stages[other][name])


ENDS_OF_2, ENDS_OF_4 = {"tokens": (0, 1)}, {"tokens": (0, 3)}
SCHEDULES_ON_2 = [
    ("gpipe", ENDS_OF_2),
    ("zero_bubble_1", ENDS_OF_2),
    # The V has stages 0 and 3 on rank 0, 1 and 2 on rank 1.
    ("zero_bubble_v", ENDS_OF_4),
    ("dual_pipe_v", {"tokens": (0, 1, 3), "second": (1, 2)}),
    # The loop has stages 0 and 2 on rank 0, 1 and 3 on rank 1.
    ("1f1b_2", {"tokens": (0, 1, 3), "second": (0, 2), "third": (1, 2)}),
]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("schedule", "ties"), SCHEDULES_ON_2, ids=[schedule for schedule, _ in SCHEDULES_ON_2])
def test_equal_to_one_weight_on_one_process(schedule: str, ties: dict[str, tuple[int, ...]]):
    check_parity(schedule, ties, pipeline_parallel=2)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("degree", ["data_parallel_replicate", "data_parallel_shard"])
@pytest.mark.parametrize(("schedule", "ties"), [("zero_bubble_1", ENDS_OF_2), ("zero_bubble_v", ENDS_OF_4)])
def test_equal_with_data_parallelism(schedule: str, ties: dict[str, tuple[int, ...]], degree: str):
    check_parity(schedule, ties, pipeline_parallel=2, **{degree: 2})


@pytest.mark.world_size(4)
def test_each_weight_is_summed_among_its_own_ranks():
    ties = {"tokens": (0, 1, 3), "b": (1, 2), "a": (2, 3), "c": (0, 2), "d": (1, 2)}
    check_parity("1f1b_1", ties, pipeline_parallel=4)


# The number of collectives


def count_collectives(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the number of elements of each sum from now on."""
    calls: list[int] = []
    original: Callable[..., object] = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        calls.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", counted)
    return calls


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("schedule", "ties", "expected"),
    [
        ("gpipe", {}, []),
        ("gpipe", ENDS_OF_2, [1, NUM_ROWS * WIDTH]),
        ("zero_bubble_v", ENDS_OF_4, []),
        ("zero_bubble_v", {"tokens": (0, 3), "a": (0, 1), "b": (0, 1)}, [2, NUM_ROWS * WIDTH, NUM_ROWS * WIDTH]),
    ],
)
def test_one_sum_for_each_weight_and_one_for_the_usage(
    schedule: str, ties: dict[str, tuple[int, ...]], expected: list[int], monkeypatch: pytest.MonkeyPatch
):
    job = Job(DeviceMeshParameters(pipeline_parallel=2).build(), schedule, ties)
    with job.manager.install():
        calls = count_collectives(monkeypatch)
        job.step(0)
        # Besides: loss with weight, and the norm over stages.
        assert calls == [2, *expected, 1]


# Gradients that are missing


def tied_pair(
    context: DistributedContext, *, is_frozen: bool = False, is_transposed: bool = False
) -> tuple[Table, TiedGradients, GradientSynchronizer]:
    """Build one tied table on each rank of a pipeline of two."""
    rank = context.pipeline_group.rank()

    class Copy(Table):
        def tied_parameters(self) -> dict[str, str]:
            return {"weight": "table"}

    module = Copy(rank).requires_grad_(not is_frozen)
    if is_transposed:
        module.weight = nn.Parameter(torch.empty(WIDTH, NUM_ROWS, dtype=torch.float64).T)
    if context.mesh_params.has_data_parallel_replicate:
        parallelize_replicate(module, context.mesh_for(DENSE_DOMAIN)["dp_replicate"])
    module.reset_parameters()
    ties = tie_parameters([module], agree_on_ties([module], [rank], context, StageMemory()), context)
    synchronizer = GradientSynchronizer([list(module.parameters())], 1, uncounted=ties.uncounted())
    gradients = TiedGradients(ties, synchronizer)
    gradients.refuse_differences()
    synchronizer.bind()
    return module, gradients, synchronizer


@pytest.mark.world_size(4)
@pytest.mark.parametrize("degrees", [{"pipeline_parallel": 2, "data_parallel_replicate": 2}])
@pytest.mark.parametrize("users", [(), (0,), (3,), (0, 1, 2, 3)])
def test_a_copy_that_nobody_has_used(degrees: dict[str, int], users: tuple[int, ...]):
    context = DeviceMeshParameters(**degrees).build()
    module, gradients, synchronizer = tied_pair(context)
    [parameter] = module.parameters()
    for _ in range(2):
        synchronizer.set_required_accumulations(1)
        if context.rank in users:
            module.weight.sum().backward()
        synchronizer.wait()
        gradients.sum()
        if not users:
            assert parameter.grad is None
        else:
            assert isinstance(parameter.grad, DTensor)
            assert parameter.grad.to_local().eq(float(len(users))).all()
            synchronizer.scale_grads(torch.tensor(0.5, dtype=torch.float64))
            assert parameter.grad.to_local().eq(len(users) / 2).all()
            [part] = synchronizer.local_gradients()
            assert part.is_counted == (context.pipeline_group.rank() == 0)
            assert part.tensors[0].eq(len(users) / 2).all()
        synchronizer.zero_grad()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("users", [(), (0,), (1,), (0, 1)])
def test_a_plain_copy_that_nobody_has_used(users: tuple[int, ...]):
    context = DeviceMeshParameters(pipeline_parallel=2).build()
    module, gradients, synchronizer = tied_pair(context, is_transposed=True)
    first = Table(0)
    first.reset_parameters()
    assert torch.equal(module.weight, first.weight)
    for _ in range(2):
        if context.rank in users:
            (module.weight.T * torch.arange(NUM_ROWS)).sum().backward()
            assert not module.weight.grad.is_contiguous()  # as the parameter
        gradients.sum()
        if not users:
            assert module.weight.grad is None
        else:
            row = torch.arange(NUM_ROWS, dtype=torch.float64)
            assert torch.equal(module.weight.grad, len(users) * row.unsqueeze(1).expand(NUM_ROWS, WIDTH))
        synchronizer.zero_grad()


@pytest.mark.parametrize("users", [(), (0,), (1,), (0, 1)])
def test_copies_on_one_rank_that_nobody_has_used(users: tuple[int, ...]):
    copies = tuple(nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in range(2))
    synchronizer = GradientSynchronizer([list(copies)], 1)
    ties = TiedParameters((TiedWeight(key="key", copies=copies, has_first=True, group=None),))
    assert [id(copy) for copy in ties.uncounted()] == [id(copies[1])]
    synchronizer.bind()
    for index in users:
        (copies[index] * torch.tensor([1.0, 2.0])).sum().backward()
    TiedGradients(ties, synchronizer).sum()
    for copy in copies:
        expected = [1.0 * len(users), 2.0 * len(users)] if users else None
        assert (copy.grad if copy.grad is None else copy.grad.tolist()) == expected


@pytest.mark.world_size(2)
def test_frozen_copies_only_share_their_values(monkeypatch: pytest.MonkeyPatch):
    context = DeviceMeshParameters(pipeline_parallel=2).build()
    module, gradients, _ = tied_pair(context, is_frozen=True)
    calls = count_collectives(monkeypatch)
    gradients.sum()
    assert calls == []
    first = Table(0)
    first.reset_parameters()
    assert torch.equal(module.weight, first.weight)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("change", ["frozen", "dtype"])
def test_copies_that_come_to_differ_are_refused(change: str):
    job = Job(DeviceMeshParameters(pipeline_parallel=2).build(), "gpipe", ENDS_OF_2)
    if job.context.rank == 1:
        [copy] = job.tracked.ties.weights[0].copies
        if change == "frozen":
            copy.requires_grad_(False)
        else:
            copy.grad_dtype = torch.float32
    manager = GradientManager(job.context, job.tracked, GradientManagerConfig())
    with pytest.raises(
        ValueError, match=r"'tokens' differ in requires_grad or in the dtype.*Freeze all of them or none"
    ):
        manager.install().__enter__()


# What is refused at build


class Sendless(nn.Module):
    """A stage that is built and never run."""

    def stage_transfer_spec(self, pipeline_input: object, boundary: StageBoundary) -> TensorSpec:
        raise NotImplementedError


class Declaring(Sendless):
    """A stage with given parameters, which it ties as told."""

    def __init__(self, parameters: dict[str, nn.Parameter], ties: dict[str, str]) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        self.ties = ties

    def tied_parameters(self) -> dict[str, str]:
        return self.ties


def parameter(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape or (4, 3), dtype=dtype), requires_grad=requires_grad)


def refusal(schedule: str, stages: Callable[[int], nn.Module], context: DistributedContext | None = None) -> str:
    context = context or DeviceMeshParameters(pipeline_parallel=2).build()
    with pytest.raises(ValueError, match=r"^tied parameters: ") as error:
        build_stages(context, schedule, lambda info: stages(info.current_stage))
    return str(error.value)


DIFFERENCES = {
    "shape": (parameter(4, 3), parameter(5, 3), "shape: (4, 3) in stage 0 (a); (5, 3) in stage 1 (b)."),
    "dtype": (
        parameter(),
        parameter(dtype=torch.float64),
        "dtype: torch.float32 in stage 0 (a); torch.float64 in stage 1 (b).",
    ),
    "frozen": (
        parameter(),
        parameter(requires_grad=False),
        "requires_grad: True in stage 0 (a); False in stage 1 (b).",
    ),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_different_copies_are_refused(difference: str):
    first, second, text = DIFFERENCES[difference]
    message = refusal(
        "gpipe",
        lambda stage: Declaring({"b": second}, {"b": "key"}) if stage else Declaring({"a": first}, {"a": "key"}),
    )
    assert message == f"tied parameters: the copies of 'key' differ in {text} They must have the same."


@pytest.mark.world_size(4)
def test_copies_with_different_placements_are_refused():
    context = DeviceMeshParameters(pipeline_parallel=2, data_parallel_shard=2).build()
    mesh = context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard"]
    rank = context.pipeline_group.rank()
    module = Declaring({"weight": parameter()}, {"weight": "key"})
    if rank == 0:
        parallelize_hsdp(module, mesh)
    else:
        parallelize_replicate(module, mesh)
    where = (
        r"Shard\(dim=0\) over dp_cp_shard \(2\) in stage 0 \(weight\); Replicate\(\) over dp_cp_shard \(2\) in stage 1"
    )
    with pytest.raises(ValueError, match=rf"differ in placements: {where}"):
        agree_on_ties([module], [rank], context, StageMemory())


@pytest.mark.world_size(2)
def test_all_problems_come_in_one_error_on_all_ranks():
    def build(stage: int) -> nn.Module:
        if stage == 0:
            return Declaring({"a": parameter(), "b": parameter()}, {"a": "alone", "c": "unknown"})
        return Declaring({"a": parameter(), "b": parameter()}, {"a": "two", "b": "two"})

    message = refusal("gpipe", build)
    assert "tied_parameters() of stage 0 names 'c' for the key 'unknown', which is no parameter of it." in message
    assert "stage 1 gives the key 'two' to a and b, which are different parameters." in message
    assert "the key 'alone' is declared by stage 0 for a only. Declare it for each parameter" in message


@pytest.mark.world_size(2)
@pytest.mark.parametrize("shares", ["parameter", "module", "view"])
def test_an_undeclared_tie_on_one_rank_is_refused(shares: str):
    tables: dict[int, nn.Module] = {}

    def build(stage: int) -> nn.Module:
        module = Sendless()
        module.table = Table(stage)
        if 0 in tables:
            if shares == "module":
                module.table = tables[0]
            elif shares == "parameter":
                module.table.weight = tables[0].weight
            else:
                module.table.weight = nn.Parameter(tables[0].weight.data[1:])
        tables[stage] = module.table
        return module

    # Rank 0 builds stages 0 and 3, and rank 1 builds 1 and 2, which share nothing.
    message = refusal("zero_bubble_v", build)
    assert message.count("share memory") == 1
    assert "table.weight of stage 0 and table.weight of stage 3 share memory" in message
    assert "declare both under one key by tied_parameters()" in message


@pytest.mark.world_size(4)
@pytest.mark.parametrize("degree", ["data_parallel_replicate", "data_parallel_shard"])
def test_an_undeclared_tie_is_found_before_it_is_distributed_twice(degree: str):
    tables: dict[int, nn.Module] = {}

    def build(stage: int) -> nn.Module:
        module = Sendless()
        module.table = tables.setdefault(0, Table(0)) if stage in (0, 3) else Table(stage)
        return module

    context = DeviceMeshParameters(pipeline_parallel=2, **{degree: 2}).build()
    assert "table.weight of stage 3 share memory" in refusal("zero_bubble_v", build, context)


# Ties within a stage


@pytest.mark.world_size(2)
def test_a_tie_within_a_stage_is_its_own():
    class Within(Declaring):
        def reset_parameters(self) -> None:
            for weight in self.parameters():
                nn.init.ones_(weight)

    def build(stage: int) -> nn.Module:
        weight = parameter()
        return Within({"a": weight, "b": weight}, {"a": f"of stage {stage}", "b": f"of stage {stage}"})

    for degrees in ({"pipeline_parallel": 2}, {"data_parallel_replicate": 2}):
        _, tracked = build_stages(
            DeviceMeshParameters(**degrees).build(), "gpipe", lambda info: build(info.current_stage)
        )
        assert tracked.ties.weights == ()
        [module] = tracked.modules
        assert module.a is module.b


def test_one_stage_is_checked_for_names_and_objects():
    context = DeviceMeshParameters().build()
    first, second = parameter(), parameter()
    message = refusal("gpipe", lambda _: Declaring({"a": first, "b": second}, {"a": "k", "b": "k", "c": "k"}), context)
    assert "tied_parameters() of stage 0 names 'c' for the key 'k'" in message
    assert "stage 0 gives the key 'k' to a and b, which are different parameters." in message
    assert agree_on_ties([Declaring({"a": first}, {"a": "only"})], [0], context, StageMemory()) == []
