"""A failure on one rank: it says where and why, the others say the same at once, and nobody goes on."""

import time
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.pipelining.actions import ForwardComputeAction
from d9d.pipelining.api import PipelineStageInfo, StageBoundary
from d9d.pipelining.failure import FailureBoard, PipelineActionError, PipelinePeerError, naming_failed_peers
from tests.harness.pipelines import Pipeline, ScaleStage, build_pipeline, numbered_inputs, told

NOTICED_WITHIN_S = 10.0

Where = Literal["forward", "loss", "backward", "incoming spec", "outgoing spec"]


class BoomError(Exception):
    """What user code raises here."""


class RaisingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise BoomError("no gradient today")


class FailingStage(ScaleStage):
    """Fails on one stage, in one place, at the microbatch that is full of 3.0, which has index 2."""

    def __init__(self, info: PipelineStageInfo, at: int, where: Where, error: BaseException) -> None:
        super().__init__(info)
        self.where = where if info.current_stage == at else None
        self.error = error

    def forward(self, inputs: torch.Tensor, shared: int) -> torch.Tensor:
        if self.where == "forward" and shared == 2:
            raise self.error
        output = super().forward(inputs, shared)
        return RaisingBackward.apply(output) if self.where == "backward" and shared == 2 else output  # pyright: ignore[reportReturnType]

    def stage_transfer_spec(self, pipeline_input: torch.Tensor, boundary: StageBoundary) -> Any:
        if self.where == f"{boundary.value} spec" and pipeline_input[0] == 3.0:
            raise self.error
        return super().stage_transfer_spec(pipeline_input, boundary)

    def loss(self, output: torch.Tensor, index: int) -> torch.Tensor:
        if self.where == "loss" and index == 2:
            raise self.error
        return output.sum()


def run_failing(pipeline: Pipeline, num_microbatches: int = 12) -> BaseException:
    """Run a step that fails, and return the error of this rank, which comes soon.

    A pack is so long that all ranks are still at work when one fails: who is done already returns without an error.
    """
    last = max(pipeline.modules)
    inputs = numbered_inputs([(4,)] * num_microbatches)
    start = time.perf_counter()
    with pytest.raises(BaseException) as info:  # noqa: PT011 - KeyboardInterrupt is among them
        pipeline.executor.step(inputs, tuple(range(num_microbatches)), pipeline.modules[last].loss)
    assert time.perf_counter() - start < NOTICED_WITHIN_S
    return info.value


def check_failure(schedule: str, pp_size: int, at: int, where: Where, action: str) -> None:
    cause = BoomError("out of luck")
    pipeline = build_pipeline(schedule, pp_size, lambda info: FailingStage(info, at, where, cause))
    error = run_failing(pipeline)
    text = "BoomError: no gradient today" if where == "backward" else "BoomError: out of luck"
    assert f"action {action} failed on pipeline rank" in str(error)
    assert f"(stage {at}, microbatch 2): {text}" in str(error)
    if at in pipeline.modules:
        assert type(error) is PipelineActionError
        assert type(error.__cause__) is BoomError
    else:
        assert type(error) is PipelinePeerError
    check_no_further_step(pipeline)


def check_no_further_step(pipeline: Pipeline) -> None:
    with pytest.raises(RuntimeError, match="has failed in an earlier step"):
        pipeline.executor.step(numbered_inputs([(4,)]), (0,), lambda output, _: output.sum())


@pytest.mark.world_size(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_exception_in_the_forward_pass(stage: int):
    check_failure("1f1b_1", 4, stage, "forward", f"{stage}F2")


@pytest.mark.world_size(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_exception_in_the_backward_pass(stage: int):
    check_failure("1f1b_1", 4, stage, "backward", f"{stage}B2")


@pytest.mark.world_size(4)
def test_an_exception_in_the_loss():
    check_failure("1f1b_1", 4, 3, "loss", "3F2")


@pytest.mark.world_size(4)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_exception_in_the_spec_of_an_output(stage: int):
    check_failure("1f1b_1", 4, stage, "outgoing spec", f"{stage}F2")


@pytest.mark.world_size(4)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_exception_in_the_spec_of_an_input(stage: int):
    check_failure("1f1b_1", 4, stage, "incoming spec", f"{stage}RECV_F2")


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("schedule", "action"),
    [("gpipe", "1F2"), ("looped_bfs_2", "1F2"), ("1f1b_2", "1F2"), ("zero_bubble_2", "1F2"), ("zero_bubble_v", "1F2")],
)
def test_an_exception_in_any_schedule(schedule: str, action: str):
    check_failure(schedule, 2, 1, "forward", action)


@pytest.mark.world_size(2)
def test_an_exception_in_half_a_backward_pass():
    for schedule in ("zero_bubble_1", "zero_bubble_2"):
        with told(schedule):
            check_failure(schedule, 2, 1, "backward", "1I2")


@pytest.mark.world_size(2)
def test_an_exception_in_inference():
    # Of the first stage: nobody waits for a later one without backward passes.
    check_failure("inference", 2, 0, "forward", "0F2")


@pytest.mark.world_size(2)
def test_an_action_of_two_is_named_as_a_whole():
    # 1F4 runs together with 2B2 or the like, so the text cannot say which of them it was; the traceback does.
    pipeline = build_pipeline(
        "dual_pipe_v", 2, lambda info: FailingStage(info, 2, "backward", BoomError("out of luck"))
    )
    error = run_failing(pipeline)
    assert "2B2" in str(error)
    assert "no gradient today" in str(error)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ctrl_c_on_one_rank_ends_the_others(stage: int):
    pipeline = build_pipeline("1f1b_1", 4, lambda info: FailingStage(info, stage, "forward", KeyboardInterrupt()))
    error = run_failing(pipeline)
    if stage in pipeline.modules:
        assert type(error) is KeyboardInterrupt
    else:
        assert type(error) is PipelinePeerError
        assert (
            f"pipeline rank {stage} (rank {stage} of the job) was interrupted at {stage}F2: KeyboardInterrupt"
            in str(error)
        )
    check_no_further_step(pipeline)


@pytest.mark.world_size(2)
def test_a_loss_without_a_backward_pass_is_an_error_on_all_ranks():
    for loss in (lambda output: output, lambda output: output.sum().detach(), lambda output: None):
        pipeline = build_pipeline("1f1b_1", 2, ScaleStage)
        with pytest.raises((PipelineActionError, PipelinePeerError), match="the loss of microbatch 0"):
            pipeline.executor.step(numbered_inputs([(4,)] * 3), (None,) * 3, lambda output, _: loss(output))  # noqa: B023


@pytest.mark.world_size(2)
def test_another_pipeline_of_the_same_ranks_lives_on():
    broken = build_pipeline("1f1b_1", 2, lambda info: FailingStage(info, 1, "forward", BoomError("out of luck")))
    intact = build_pipeline("1f1b_1", 2, ScaleStage)
    run_failing(broken)
    intact.executor.step(numbered_inputs([(4,)] * 3), (None,) * 3, lambda output, _: output.sum())
    (module,) = intact.modules.values()
    assert module.weight.grad == 4 * (1 + 2 + 3)


@pytest.mark.world_size(2)
def test_a_rank_that_is_through_hears_of_a_later_failure_from_its_next_collective():
    context = DeviceMeshParameters(pipeline_parallel=2).build()
    board = FailureBoard(context.pipeline_group, torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"^another matter$"), naming_failed_peers(context):
        raise RuntimeError("another matter")
    dist.barrier()
    if dist.get_rank() == 0:
        board.report(ForwardComputeAction(0, 7), BoomError("too late"))
    dist.barrier()
    if dist.get_rank() == 1:
        expected = r"a collective failed, because action 0F7 failed on pipeline rank 0 .*BoomError: too late"
        with pytest.raises(PipelinePeerError, match=expected), naming_failed_peers(context):
            raise RuntimeError("connection closed")
