"""Say how a LightningModule runs on a mesh: steps, placements, bytes."""
# A module without a Trainer raises when it is asked for it
# pyright: reportPrivateUsage=false

from lightning.pytorch import LightningModule
from torch import nn

from d9d.core.dist_context import DeviceMeshParameters
from d9d.module.parallelism.explain import StageMap, layout_table, mesh_line, predict_layouts, read_layouts
from d9d.module.parallelism.plan import ParallelPlan, resolve_plan, rules_of


def explain_module(
    module: nn.Module,
    plan: ParallelPlan,
    params: DeviceMeshParameters,
    *,
    is_distributed: bool,
    steps: str,
    stage_map: StageMap | None = None,
) -> str:
    """Describe how a module runs on a mesh, for a person to read. No communication.

    Args:
        module: The LightningModule.
        plan: What goes where.
        params: Parallelism degrees.
        is_distributed: Whether it was distributed already. Else the table says what will be.
        steps: How steps are run, in a line.
        stage_map: Stages of a module that is not cut yet; None without a pipeline.

    Raises:
        ValueError: If the module is not distributed yet, and the plan cannot be used on it.
    """
    head = [mesh_line(params), f"steps: {steps}"]
    if is_distributed:
        resolved = None if callable(plan.parallelize) else rules_of(module, plan, params)
        layouts = read_layouts(module, resolved)
    elif callable(plan.parallelize):
        head.append("placements: a function makes them when the Trainer starts; here is the module as it is now")
        layouts = read_layouts(module)
    else:
        head.append("placements: as they will be on rank 0; the module is not distributed yet")
        layouts = predict_layouts(module, resolve_plan(module, plan, params), params, stage_map)
    return layout_table(layouts, head)


def steps_line(
    params: DeviceMeshParameters, microbatches: int | None, schedule: str, accumulate: int | None = None
) -> str:
    """Say in one line how a step runs: which of the three feeders fills it. See [Note: three feeders].

    Args:
        params: Parallelism degrees.
        microbatches: Number of microbatches that a batch is cut into; None leaves it whole.
        schedule: Name of the pipeline schedule.
        accumulate: The Trainer's ``accumulate_grad_batches``; None if there is no Trainer yet.
    """
    num_parts = microbatches or 1
    cut = f"each batch is cut into {num_parts} microbatches" if num_parts > 1 else ""
    if not params.has_pipeline_parallel:
        native = "native, one batch after the other by Lightning's own loop"
        return f"split, {cut}, forward and backward in turn" if cut else native
    place = f"pipeline over {params.pipeline_parallel} ranks ({schedule})"
    if accumulate is None:
        window = "" if cut else "the batches that accumulate_grad_batches puts together run as one pack"
    elif accumulate > 1:
        window = f"{accumulate} batches, those of an accumulation window, run as one pack"
    else:
        window = "" if cut else "each batch is one microbatch, so stages wait for each other: set microbatches"
    feeder = "split" if accumulate == 1 else "gather"
    if accumulate is None and cut:
        feeder = "split (gather, if accumulate_grad_batches > 1)"
    return f"{feeder}, {place}: " + "; ".join(text for text in (cut, window) if text)


def accumulation_of(module: nn.Module) -> int | None:
    """Return ``accumulate_grad_batches`` of the Trainer that a module belongs to; None if it belongs to none."""
    trainer = module._trainer if isinstance(module, LightningModule) else None
    return None if trainer is None else trainer.accumulate_grad_batches
