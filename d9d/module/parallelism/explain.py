"""Show where the parameters of a module are: a table of placements and bytes."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from d9d.core.dist_context import DENSE_DOMAIN, EXPERT_DOMAIN, DeviceMeshParameters
from d9d.core.module_names import collapse_numbers
from d9d.core.placement import local_tensor
from d9d.module.parallelism.plan import ParallelPlan, ResolvedPlan, resolve_plan
from d9d.module.parallelism.plan_words import Choice, cuts_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParameterLayout:
    """Where one parameter is."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dtype: torch.dtype
    """Type of its elements."""
    domain: str
    """The domain of whose meshes it is."""
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


def explain_plan(module: nn.Module, plan: ParallelPlan, params: DeviceMeshParameters) -> str:
    """Describe where a plan puts the parameters of a module that is not distributed yet, for a person to read.

    No communication; the module may be on the meta device.

    Args:
        module: The whole model.
        plan: What goes where; patterns or the default.
        params: Parallelism degrees.

    Returns:
        A table: parameter, shape, domain, placements over its mesh dimensions, type, bytes on the first rank and in total,
        and the pattern that says so.

    Raises:
        ValueError: If the plan cannot be used on the module.
    """
    return layout_table(predict_layouts(module, resolve_plan(module, plan, params), params), [mesh_line(params)])


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
            domain=_domain_of(parameter),
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
        is_of_expert_domain = _predict_split(name, shape, placements, resolved, params)
        stage = None if stage_map is None else stage_map.stages.get(name)
        is_outside = stage_map is not None and stage is None
        is_dense_shard = _is_sharded(name, resolved) and not is_outside and not is_of_expert_domain
        if num_shards > 1 and shape and is_dense_shard:
            _cut(shape, 0, num_shards, placements, "dp_cp_shard")
        if stage is not None:
            placements["pp"] = f"stage {stage}"
        is_elsewhere = stage_map is not None and stage is not None and stage not in stage_map.of_first_rank
        layouts[name] = ParameterLayout(
            shape=tuple(parameter.shape),
            dtype=parameter.dtype,
            domain=EXPERT_DOMAIN if is_of_expert_domain else DENSE_DOMAIN,
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
    rows: list[tuple[str, ...]] = [
        ("parameter", "shape", "domain", "placements", "type", "on this rank", "in total", "plan", "")
    ]
    groups = collapse_numbers({name: dataclasses.astuple(layout) for name, layout in layouts.items()})
    rows += [_row(group.name, [layouts[name] for name in group.members]) for group in groups]
    rows.append(("total", "", "", "", "", *_sizes(layouts.values()), "", ""))
    frozen = [layout for layout in layouts.values() if layout.is_frozen]
    if frozen:
        rows.append(("of it frozen", "", "", "", "", *_sizes(frozen), "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    table.insert(1, "-" * max(map(len, table)))
    return "\n".join([*head, *table])


def mesh_line(params: DeviceMeshParameters) -> str:
    """Say in one line what the mesh is."""
    degrees = [f"{name} {degree}" for name, degree in params.model_dump().items() if degree > 1]
    return f"mesh: {' x '.join(degrees) or 'one process'} ({params.world_size} processes)"


def _row(name: str, layouts: Sequence[ParameterLayout]) -> tuple[str, ...]:
    first = layouts[0]
    marks = ["frozen"] if first.is_frozen else []
    if first.tied_to:
        marks.append(f"tied to {first.tied_to}")
    count = f" x {len(layouts)}" if len(layouts) > 1 else ""
    return (
        name,
        f"{'x'.join(map(str, first.shape)) or 'scalar'}{count}",
        first.domain,
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


def _predict_split(
    name: str, shape: list[int], placements: dict[str, str], resolved: ResolvedPlan, params: DeviceMeshParameters
) -> bool:
    """Cut the shape of a parameter as a plan splits its layer, and tell whether it goes to the expert domain."""
    found = _split_of(name, resolved)
    if found is None:
        return False
    choice, inner_name = found
    cut = cuts_of(choice, params.tensor_parallel).get(inner_name)
    if cut is None:
        return False
    is_of_experts = cut.mesh_dim == "ep_shard"
    degree = params.expert_parallel if is_of_experts else params.tensor_parallel
    _cut(shape, cut.dim, degree, placements, cut.mesh_dim)
    return is_of_experts and params.has_expert_parallel


def _split_of(name: str, resolved: ResolvedPlan) -> tuple[Choice, str] | None:
    """Return what a plan says of the block around a parameter, and the name of the parameter in it."""
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        choice = resolved.splits.get(".".join(parts[:depth]))
        if choice is not None:
            return choice, ".".join(parts[depth:])
    return None


def _domain_of(parameter: nn.Parameter) -> str:
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else None
    return EXPERT_DOMAIN if names is not None and "ep_shard" in names else DENSE_DOMAIN


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
    found = _split_of(name, resolved)
    split = None if found is None else found[0]
    placed = _innermost(name, resolved.placements or {})
    return ", ".join(f"{choice.pattern}: {choice.word}" for choice in (split, placed) if choice is not None)
