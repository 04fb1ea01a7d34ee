"""What the pipeline benchmark compares with: torch.distributed.pipelining, a minimal loop and compute alone."""

import functools
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from d9d.pipelining.actions import (
    ActionBase,
    BackwardFullInputComputeAction,
    BackwardWeightComputeAction,
    ForwardComputeAction,
    flat_actions,
)
from tests.benchmarks.pipeline_stages import Competitor, Pack, StageKind, build_stage


def hosted_stages(*, rank: int, num_ranks: int, num_stages: int, is_v: bool) -> list[int]:
    """Return the stages of a rank: a V with two stages a rank, otherwise in turn."""
    return [rank, num_stages - 1 - rank] if is_v else list(range(rank, num_stages, num_ranks))


class _StaticStage(PipelineStage):
    """Takes the shapes that it is given, without a vote of all ranks on whether to infer them.

    The vote is part of the first step only, and fails on a process group whose transfers do nothing.
    """

    def _warmup_forward_vote(self, has_backward: bool, received_acc: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)


def torch_competitor(
    schedule_type: type[PipelineScheduleSingle] | type[PipelineScheduleMulti],
    kind: StageKind,
    pack: Pack,
    hosted: list[int],
    num_stages: int,
) -> Competitor:
    num_ranks = dist.get_world_size()
    stages = [
        _StaticStage(
            build_stage(kind, index, num_stages, num_ranks),
            index,
            num_stages,
            torch.device("cpu"),
            input_args=torch.empty(kind.shape, device="meta", requires_grad=index > 0),
            output_args=torch.empty(kind.shape, device="meta", requires_grad=True),
        )
        for index in hosted
    ]
    if issubclass(schedule_type, PipelineScheduleSingle):
        schedule = schedule_type(stages[0], len(pack), loss_fn=F.mse_loss, scale_grads=False)
    else:
        schedule = schedule_type(list(stages), len(pack), loss_fn=F.mse_loss, scale_grads=False)
    arguments = [(x,) for x in pack.inputs] if 0 in hosted else None
    targets = pack.targets if num_stages - 1 in hosted else None
    for stage in stages:
        stage.has_backward = True

    def run() -> list[torch.Tensor]:
        # The public step() takes a whole batch, cuts it into microbatches and runs them with this. Ours gets
        # microbatches, so torch gets them too and does not pay for the cuts: what is left of step() is the next line.
        for stage in stages:
            stage.clear_runtime_states()
        losses: list[torch.Tensor] = []
        schedule._step_microbatches(arguments, None, targets, losses, return_outputs=False)  # pyright: ignore[reportPrivateUsage]
        return losses

    return Competitor(run, {stage.stage_index: stage.submod for stage in stages})


def gpipe_order(num_microbatches: int, rank: int, num_ranks: int) -> Iterable[tuple[str, int]]:
    """Yield all forward passes, then all backward passes."""
    yield from (("F", index) for index in range(num_microbatches))
    yield from (("B", index) for index in range(num_microbatches))


def one_f_one_b_order(num_microbatches: int, rank: int, num_ranks: int) -> Iterable[tuple[str, int]]:
    """Yield the forward passes that fill the stages after this one, then one backward pass after each forward pass."""
    num_warmup = min(num_ranks - 1 - rank, num_microbatches)
    yield from (("F", index) for index in range(num_warmup))
    for index in range(num_microbatches):
        if index + num_warmup < num_microbatches:
            yield "F", index + num_warmup
        yield "B", index


class MinimalLoop:
    """Runs the passes of one stage per rank in a given order with isend, irecv and backward, and nothing else.

    All receives of a pack are posted ahead into buffers that stay, and sends are waited for at the end.
    """

    def __init__(self, kind: StageKind, pack: Pack, order: Iterable[tuple[str, int]]) -> None:
        self._rank, self._num_ranks = dist.get_rank(), dist.get_world_size()
        self.stage = build_stage(kind, self._rank, self._num_ranks, self._num_ranks)
        self._pack = pack
        self._order = list(order)
        self._is_first, self._is_last = self._rank == 0, self._rank == self._num_ranks - 1
        self._received_inputs, self._received_grads = (
            [torch.zeros(kind.shape) for _ in range(len(pack))] for _ in range(2)
        )
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._works_forward: list[dist.Work | None] = []
        self._works_backward: list[dist.Work | None] = []
        self._sends: list[dist.Work | None] = []

    def run(self) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        if not self._is_first:
            self._works_forward = [dist.irecv(buffer, self._rank - 1) for buffer in self._received_inputs]
        if not self._is_last:
            self._works_backward = [dist.irecv(buffer, self._rank + 1) for buffer in self._received_grads]
        for kind, index in self._order:
            if kind == "F":
                self._forward(index, losses)
            else:
                self._backward(index)
        for work in self._sends:
            _wait(work)
        self._sends.clear()
        return losses

    def _forward(self, index: int, losses: list[torch.Tensor]) -> None:
        if self._is_first:
            x = self._pack.inputs[index]
        else:
            _wait(self._works_forward[index])
            x = self._inputs[index] = self._received_inputs[index].detach().requires_grad_()
        output = self.stage(x)
        if self._is_last:
            output = F.mse_loss(output, self._pack.targets[index])
            losses.append(output)
        else:
            self._sends.append(dist.isend(output.detach(), self._rank + 1))
        self._outputs[index] = output

    def _backward(self, index: int) -> None:
        if self._is_last:
            torch.autograd.backward(self._outputs.pop(index))
        else:
            _wait(self._works_backward[index])
            torch.autograd.backward(self._outputs.pop(index), self._received_grads[index])
        if not self._is_first:
            gradient = self._inputs.pop(index).grad
            assert gradient is not None
            self._sends.append(dist.isend(gradient, self._rank - 1))


def _wait(work: dist.Work | None) -> None:
    # None only on a rank that is not in the group.
    if work is not None:
        work.wait()


def minimal_competitor(kind: StageKind, pack: Pack, order: Iterable[tuple[str, int]]) -> Competitor:
    loop = MinimalLoop(kind, pack, order)
    return Competitor(loop.run, {dist.get_rank(): loop.stage})


def full_passes(hosted: list[int], num_microbatches: int) -> list[ActionBase]:
    """Return a forward and a full backward pass of each stage and microbatch."""
    actions: list[ActionBase] = []
    for stage in hosted:
        for index in range(num_microbatches):
            actions.append(ForwardComputeAction(stage, index))
            actions.append(BackwardFullInputComputeAction(stage, index, full_backward=True))
    return actions


class ComputeAlone:
    """Runs the passes of a rank's program by plain autograd, and no transfers: what an executor can not save.

    Not for stages that sleep in several layers and split backward passes: autograd goes through the later layers twice.
    """

    def __init__(self, kind: StageKind, pack: Pack, actions: Iterable[ActionBase], num_stages: int) -> None:
        self._kind, self._pack, self._num_stages = kind, pack, num_stages
        self._gradient = torch.zeros(kind.shape)
        self.stages: dict[int, nn.Module] = {}
        self._parameters: dict[int, list[nn.Parameter]] = {}
        self._passes: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._calls = [call for action in flat_actions(actions) if (call := self._call_of(action)) is not None]

    def run(self) -> list[torch.Tensor]:
        for call in self._calls:
            call()
        return []

    def _call_of(self, action: ActionBase) -> Callable[[], None] | None:
        match action:
            case ForwardComputeAction(stage_idx=stage, microbatch_idx=index):
                if stage not in self.stages:
                    self.stages[stage] = build_stage(self._kind, stage, self._num_stages, dist.get_world_size())
                    self._parameters[stage] = list(self.stages[stage].parameters())
                return functools.partial(self._forward, stage, index)
            case BackwardFullInputComputeAction(stage_idx=stage, microbatch_idx=index, full_backward=full):
                return functools.partial(self._backward if full or stage == 0 else self._backward_input, stage, index)
            case BackwardWeightComputeAction(stage_idx=stage, microbatch_idx=index) if stage > 0:
                return functools.partial(self._backward_weight, stage, index)
            case _:
                return None

    def _forward(self, stage: int, index: int) -> None:
        x = self._pack.inputs[index]
        if stage > 0:
            x = x.detach().requires_grad_()
        output = self.stages[stage](x)
        if stage == self._num_stages - 1:
            output = F.mse_loss(output, self._pack.targets[index])
        self._passes[stage, index] = x, output

    def _gradient_of(self, stage: int) -> torch.Tensor | None:
        return None if stage == self._num_stages - 1 else self._gradient

    def _backward(self, stage: int, index: int) -> None:
        _, output = self._passes.pop((stage, index))
        torch.autograd.backward(output, self._gradient_of(stage))

    def _backward_input(self, stage: int, index: int) -> None:
        x, output = self._passes[stage, index]
        torch.autograd.backward(output, self._gradient_of(stage), inputs=[x], retain_graph=True)

    def _backward_weight(self, stage: int, index: int) -> None:
        _, output = self._passes.pop((stage, index))
        torch.autograd.backward(output, self._gradient_of(stage), inputs=self._parameters[stage])


def compute_alone(kind: StageKind, pack: Pack, actions: Iterable[ActionBase], num_stages: int) -> Competitor:
    loop = ComputeAlone(kind, pack, actions, num_stages)
    return Competitor(loop.run, loop.stages)
