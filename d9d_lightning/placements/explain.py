"""Show where the parameters of a module are: a table of placements and bytes."""
# A module without a Trainer raises when it is asked for it
# pyright: reportPrivateUsage=false

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.placement import local_tensor
from d9d_lightning.placements.names import collapse_numbers
from d9d_lightning.placements.plan import Choice, ParallelPlan, ResolvedPlan, cut_dims, resolve_plan, rules_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """Where one parameter is."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dtype: torch.dtype
    """Type of its elements."""
    placements: tuple[tuple[str, str], ...]
    """Mesh dimension and placement, where it is distributed along one; nothing for a plain parameter."""
    num_local: int
    """Number of elements on this rank."""
    rule: str
    """The pattern of the plan that its layout comes from; empty for the default."""
    is_frozen: bool
    """Whether it gets no gradient."""
    tied_to: str
    """Name of the same parameter elsewhere in the module, which counts the bytes; empty for any other."""

    @property
    def local_bytes(self) -> int:
        """Bytes on this rank."""
        return 0 if self.tied_to else self.num_local * self.dtype.itemsize

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole parameter."""
        return 0 if self.tied_to else torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageMap:
    """Which parameters are in which pipeline stage."""

    stages: Mapping[str, int]
    """Stage by parameter name; those outside of the stages are on all pipeline ranks, and left out."""
    of_first_rank: frozenset[int]
    """Stages that the first pipeline rank hosts."""


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


def read_layouts(module: nn.Module, resolved: ResolvedPlan | None = None) -> dict[str, ParameterLayout]:
    """Read off the layouts of the parameters that this rank has, by name. No communication.

    Args:
        module: A module that is distributed, or not at all.
        resolved: The plan that it was distributed by; None for a function, or where nobody knows it.
    """
    return {
        name: ParameterLayout(
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            placements=_placements_of(parameter),
            num_local=local_tensor(parameter).numel(),
            rule="" if resolved is None else _rule_of(name, resolved),
            is_frozen=not parameter.requires_grad,
            tied_to=tied_to,
        )
        for name, parameter, tied_to in _named_places(module)
    }


def predict_layouts(
    module: nn.Module, resolved: ResolvedPlan, params: DeviceMeshParameters, stage_map: StageMap | None = None
) -> dict[str, ParameterLayout]:
    """Say what `read_layouts` would say on rank 0, which has the largest parts, without distributing anything.

    Layers that a style of torch splits are shown as whole, as only the style knows what it does.

    Args:
        module: A module that is not distributed yet, and not cut into stages.
        resolved: The plan for it.
        params: Parallelism degrees.
        stage_map: Stages of the module; None without a pipeline.
    """
    layouts: dict[str, ParameterLayout] = {}
    num_shards = params.data_parallel_shard * params.context_parallel_shard
    for name, parameter, tied_to in _named_places(module):
        shape = list(parameter.shape)
        placements: dict[str, str] = {}
        layer, _, attribute = name.rpartition(".")
        split = resolved.splits.get(layer)
        cuts = {} if split is None else cut_dims(split)
        if attribute in cuts:
            _cut(shape, cuts[attribute], params.tensor_parallel, placements, "tp")
        stage = None if stage_map is None else stage_map.stages.get(name)
        is_outside = stage_map is not None and stage is None
        if num_shards > 1 and shape and _is_sharded(name, resolved) and not is_outside:
            _cut(shape, 0, num_shards, placements, "dp_cp_shard")
        if stage is not None:
            placements["pp"] = f"stage {stage}"
        is_elsewhere = stage_map is not None and stage is not None and stage not in stage_map.of_first_rank
        layouts[name] = ParameterLayout(
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            placements=tuple(sorted(placements.items())),
            num_local=0 if is_elsewhere else torch.Size(shape).numel(),
            rule=_rule_of(name, resolved),
            is_frozen=not parameter.requires_grad,
            tied_to=tied_to,
        )
    return layouts


def layout_table(layouts: Mapping[str, ParameterLayout], head: Sequence[str] = ()) -> str:
    """Write layouts as a table, one row for repeated blocks, with totals.

    Args:
        layouts: By parameter name.
        head: Lines above the table.
    """
    rows: list[tuple[str, ...]] = [("parameter", "shape", "placements", "type", "on this rank", "in total", "plan", "")]
    groups = collapse_numbers({name: dataclasses.astuple(layout) for name, layout in layouts.items()})
    rows += [_row(group.name, [layouts[name] for name in group.members]) for group in groups]
    rows.append(("total", "", "", "", *_sizes(layouts.values()), "", ""))
    frozen = [layout for layout in layouts.values() if layout.is_frozen]
    if frozen:
        rows.append(("of it frozen", "", "", "", *_sizes(frozen), "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    table.insert(1, "-" * max(map(len, table)))
    return "\n".join([*head, *table])


def mesh_line(params: DeviceMeshParameters) -> str:
    """Say in one line what the mesh is."""
    degrees = [f"{name} {degree}" for name, degree in params.model_dump().items() if degree > 1]
    return f"mesh: {' x '.join(degrees) or 'one process'} ({params.world_size} processes)"


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


def _row(name: str, layouts: Sequence[ParameterLayout]) -> tuple[str, ...]:
    first = layouts[0]
    marks = ["frozen"] if first.is_frozen else []
    if first.tied_to:
        marks.append(f"tied to {first.tied_to}")
    count = f" x {len(layouts)}" if len(layouts) > 1 else ""
    return (
        name,
        f"{'x'.join(map(str, first.shape)) or 'scalar'}{count}",
        ", ".join(f"{dim} {placement}" for dim, placement in first.placements) or "replicated",
        str(first.dtype).removeprefix("torch."),
        *_sizes(layouts),
        first.rule or "-",
        ", ".join(marks),
    )


def _sizes(layouts: Iterable[ParameterLayout]) -> tuple[str, str]:
    known = list(layouts)
    local, total = sum(each.local_bytes for each in known), sum(each.total_bytes for each in known)
    return _readable(local), _readable(total)


def _readable(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def _named_places(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, str]]:
    """Yield each name of each parameter, and the first name of the same one, if that is another."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        known = first.setdefault(parameter, name)
        yield name, parameter, "" if known == name else known


def _placements_of(parameter: nn.Parameter) -> tuple[tuple[str, str], ...]:
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    shown = {
        name: _words(placement)
        for dim, (name, placement) in enumerate(zip(names, parameter.placements, strict=True))
        if mesh.size(dim) > 1 and not isinstance(placement, Replicate)
    }
    return tuple(sorted(shown.items()))


def _words(placement: Placement) -> str:
    return f"dim {placement.dim}" if isinstance(placement, Shard) else str(placement)


def _cut(shape: list[int], dim: int | None, degree: int, placements: dict[str, str], mesh_dim: str) -> None:
    if dim is not None and degree > 1:
        shape[dim] = -(-shape[dim] // degree)
        placements[mesh_dim] = f"dim {dim}"


def _innermost(name: str, choices: Mapping[str, Choice]) -> Choice | None:
    """Return what a plan says of the innermost submodule that has a parameter."""
    while name:
        name = name.rpartition(".")[0]
        if name in choices:
            return choices[name]
    return None


def _is_sharded(name: str, resolved: ResolvedPlan) -> bool:
    if resolved.placements is None:
        return True
    choice = _innermost(name, resolved.placements)
    return choice is not None and choice.value != "replicate"


def _rule_of(name: str, resolved: ResolvedPlan) -> str:
    """Return the patterns that say where a parameter is."""
    split = resolved.splits.get(name.rpartition(".")[0])
    placed = _innermost(name, resolved.placements or {})
    return ", ".join(f"{choice.pattern}: {_word(choice)}" for choice in (split, placed) if choice is not None)


def _word(choice: Choice) -> str:
    return choice.value if isinstance(choice.value, str) else type(choice.value).__name__
