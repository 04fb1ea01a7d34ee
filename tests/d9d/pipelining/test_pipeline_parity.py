"""Training steps of whole pipelines against one process: losses, all gradients and one optimizer step."""

import itertools

import pytest
import torch

from tests.harness.parity import FP32_CLOSE, FP64_EXACT, assert_close_tree
from tests.harness.pipelines import (
    SCHEDULES,
    TRAINING_SCHEDULES,
    Pipeline,
    ScaleStage,
    TransformerStage,
    build_pack,
    build_pipeline,
    build_whole,
    numbered_inputs,
    part_of,
    run_whole,
    step_on_one_process,
    step_on_pipeline,
    told,
    uneven_shapes,
)

TRAINING = pytest.mark.parametrize("schedule", TRAINING_SCHEDULES)

TREES = TransformerStage(is_tree=True)
TENSORS = TransformerStage()
FLOATS = TransformerStage(dtype=torch.float32)
FLOAT_TREES = TransformerStage(dtype=torch.float32, is_tree=True)


def check_step(schedule: str, pp_size: int, num_microbatches: int, stage: TransformerStage) -> None:
    with told(f"{schedule}, {num_microbatches} microbatches, {stage}"):
        pipeline = build_pipeline(schedule, pp_size, stage)
        shapes = uneven_shapes(num_microbatches)
        expected = part_of(step_on_one_process(pipeline.num_stages, stage, shapes), pipeline)
        tolerance = FP64_EXACT if stage.dtype == torch.float64 else FP32_CLOSE
        assert_close_tree(
            step_on_pipeline(pipeline, shapes)._asdict(), expected._asdict(), atol=tolerance, rtol=tolerance
        )


@pytest.mark.world_size(2)
@TRAINING
def test_a_step_on_two_ranks_equals_one_process(schedule: str):
    for num_microbatches in (1, 5):
        check_step(schedule, 2, num_microbatches, TREES)
    check_step(schedule, 2, 4, FLOATS)


@pytest.mark.world_size(4)
@TRAINING
def test_a_step_on_four_ranks_equals_one_process(schedule: str):
    check_step(schedule, 4, 9, TREES)


@pytest.mark.exhaustive
@pytest.mark.world_size(2, timeout_s=300)
@TRAINING
def test_every_step_on_two_ranks_equals_one_process(schedule: str):
    for num_microbatches, stage in itertools.product((1, 2, 4, 5), (TENSORS, TREES, FLOATS, FLOAT_TREES)):
        check_step(schedule, 2, num_microbatches, stage)


@pytest.mark.exhaustive
@pytest.mark.world_size(4, timeout_s=300)
@TRAINING
def test_every_step_on_four_ranks_equals_one_process(schedule: str):
    for num_microbatches, stage in itertools.product((1, 4, 8, 9), (TENSORS, TREES, FLOATS, FLOAT_TREES)):
        check_step(schedule, 4, num_microbatches, stage)


# Bit for bit


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "stage",
    [
        TREES,
        TransformerStage(dtype=torch.float32),
        TransformerStage(is_tree=True, is_checkpointed=True, dropout=0.3),
        pytest.param(TransformerStage(compile_backend="aot_eager"), marks=pytest.mark.exhaustive),
        pytest.param(TransformerStage(is_checkpointed=True, compile_backend="aot_eager"), marks=pytest.mark.exhaustive),
    ],
    ids=["trees", "float32", "checkpointed", "compiled", "checkpointed and compiled"],
)
def test_one_microbatch_on_two_stages_is_bit_exact(stage: TransformerStage):
    pipeline = build_pipeline("gpipe", 2, stage)
    shapes = ((2, 5),)
    expected = part_of(step_on_one_process(2, stage, shapes), pipeline)
    assert_close_tree(step_on_pipeline(pipeline, shapes)._asdict(), expected._asdict(), atol=0.0, rtol=0.0)


@pytest.mark.world_size(2)
@TRAINING
def test_checkpointed_blocks_with_dropout(schedule: str):
    check_step(schedule, 2, 5, TransformerStage(is_tree=True, is_checkpointed=True, dropout=0.3))


@pytest.mark.exhaustive
@pytest.mark.world_size(2, timeout_s=120)
@pytest.mark.parametrize("schedule", ["1f1b_1", "zero_bubble_v"])
def test_compiled_blocks(schedule: str):
    check_step(schedule, 2, 5, TransformerStage(compile_backend="aot_eager"))


# Without backward pass


@pytest.mark.world_size(4)
@pytest.mark.parametrize("stage", [TENSORS, TREES], ids=["tensors", "trees"])
def test_inference_gives_the_outputs_of_one_process(stage: TransformerStage):
    pipeline = build_pipeline("inference", 4, stage)
    modes = (torch.no_grad, torch.inference_mode, torch.enable_grad)
    for num_microbatches, mode in itertools.product((1, 4, 9), modes):
        pack = build_pack(uneven_shapes(num_microbatches))
        outputs: dict[int, torch.Tensor] = {}

        def keep(logits: torch.Tensor, index: int, outputs: dict[int, torch.Tensor] = outputs) -> None:
            outputs[index] = logits

        with mode():
            pipeline.executor.step(pack.inputs, pack.shared, keep)
        expected = {
            index: run_whole(build_whole(4, stage), tokens, pack.shared[index])
            for index, tokens in enumerate(pack.inputs)
        }
        assert_close_tree(outputs, expected if pipeline.has_last_stage else {}, atol=0.0, rtol=0.0)


# What belongs to one microbatch meets in one place


@pytest.mark.world_size(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_input_k_meets_target_k(schedule: str):
    pipeline = build_pipeline(schedule, 2, ScaleStage)
    for shapes in ([(4,), (6,), (3,)], [(6,), (3,), (4,), (4,), (1,)], [(2, 2)]):
        losses = losses_against_the_inputs(pipeline, shapes)
        assert losses == (dict.fromkeys(range(len(shapes)), 0.0) if pipeline.has_last_stage else {})


def losses_against_the_inputs(pipeline: Pipeline, shapes: list[tuple[int, ...]]) -> dict[int, float]:
    inputs = numbered_inputs(shapes)
    losses: dict[int, float] = {}

    def loss(output: torch.Tensor, index: int) -> torch.Tensor:
        total = (output - inputs[index]).square().sum()
        losses[index] = total.item()
        return total

    pipeline.executor.step(inputs, tuple(range(len(shapes))), loss)
    return losses


@pytest.mark.world_size(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shared_k_reaches_every_stage_with_input_k(schedule: str):
    seen: list[tuple[int, float, str]] = []

    class Watching(ScaleStage):
        def forward(self, inputs: torch.Tensor, shared: str) -> torch.Tensor:
            seen.append((self.info.current_stage, inputs[0].item(), shared))
            return super().forward(inputs, shared)

    pipeline = build_pipeline(schedule, 4, Watching)
    pipeline.executor.step(numbered_inputs([(4,)] * 3), ("for 1", "for 2", "for 3"), lambda output, _: output.sum())
    assert sorted(seen) == [(stage, k, f"for {k:g}") for stage in sorted(pipeline.modules) for k in (1.0, 2.0, 3.0)]


# Packs of the same samples


def gradients_of_ten_samples(pipeline: Pipeline, programs: list[list[int]]) -> dict[int, dict[str, torch.Tensor]]:
    """Run ten samples in programs of microbatches of the given sizes."""
    whole = build_pack(((10, 4),))
    at = 0
    for sizes in programs:
        cuts = [at, *(at := at + size for size in sizes)]
        slices = [slice(start, end) for start, end in itertools.pairwise(cuts)]
        labels = [whole.labels[0][part] for part in slices]
        pipeline.executor.step(
            tuple(whole.inputs[0][part] for part in slices),
            (0.0,) * len(sizes),
            lambda logits, index, labels=labels: whole._replace(labels=tuple(labels)).loss(logits, index),
        )
    assert at == 10
    return {s: {name: p.grad for name, p in m.named_parameters()} for s, m in pipeline.modules.items()}


@pytest.mark.world_size(2)
@TRAINING
@pytest.mark.parametrize(
    "programs",
    [[[3, 3, 3, 1]], [[3, 3, 2, 2]], [[3, 3], [2, 2]], [[3, 3], [3, 1]], [[10]]],
    ids=["the last is smaller", "one of 4", "two of 2", "two of 2, the last is smaller", "one of 1"],
)
def test_ten_samples_give_the_same_gradients_however_they_are_cut(schedule: str, programs: list[list[int]]):
    pipeline = build_pipeline(schedule, 2, TENSORS)
    expected = step_on_one_process(pipeline.num_stages, TENSORS, ((10, 4),)).gradients
    gradients = gradients_of_ten_samples(pipeline, programs)
    assert_close_tree(gradients, {s: expected[s] for s in pipeline.modules}, atol=FP64_EXACT, rtol=FP64_EXACT)


@pytest.mark.world_size(2)
@TRAINING
def test_a_microbatch_of_weight_0_adds_nothing(schedule: str):
    pack = build_pack(((2, 4), (2, 4), (2, 4)))
    pipeline = build_pipeline(schedule, 2, TENSORS)
    pipeline.executor.step(pack.inputs, pack.shared, lambda logits, k: pack.loss(logits, k) * (k != 1))
    whole = build_whole(pipeline.num_stages, TENSORS)
    for k in (0, 2):
        pack.loss(run_whole(whole, pack.inputs[k], pack.shared[k]), k).backward()
    for stage, module in pipeline.modules.items():
        expected = {name: p.grad for name, p in whole[stage].named_parameters()}
        actual = {name: p.grad for name, p in module.named_parameters()}
        assert_close_tree(actual, expected, atol=FP64_EXACT, rtol=FP64_EXACT)
