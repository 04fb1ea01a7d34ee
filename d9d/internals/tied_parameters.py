"""Keep the copies of a weight equal that several stages of a pipeline have, such as those of an embedding and a head.

[Note: tied parameters]
A weight that two stages use exists once in each. Both copies start from the values of the lowest stage that has one.
Each step the gradients of all copies are summed, after the sums over data-parallel ranks and before scaling and
clipping, so that every copy has the same gradient bit for bit; an optimizer that treats the copies alike then keeps them
equal. In the norm the weight counts once, in its lowest stage.

Ranks of a pipeline with the same coordinates in all other dimensions hold the same part of a weight, given equal
placements. So sums and values travel among these alone, and shards and replicas need no thought.

The model declares ties, see `DeclaresTiedParameters`. One that it does not declare can be noticed only where two stages
are on one rank and share memory.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from d9d.core.dist_context import DistributedContext
from d9d.core.dist_ops import all_gather_object
from d9d.core.placement import compute_leaf, local_tensor
from d9d.internals.grad_bucket import gradient_dtype
from d9d.internals.grad_sync import GradientSynchronizer
from d9d.pipelining.api import DeclaresTiedParameters

__all__ = ["StageMemory", "Tie", "TiedGradients", "TiedParameters", "TiedWeight", "agree_on_ties", "tie_parameters"]


class StageMemory:
    """Remembers which stage of this rank has which memory, while the stages are built one after another."""

    def __init__(self) -> None:
        """Start with no stage."""
        # Storages are kept, since the id of one that is gone may come back.
        self._owners: dict[int, tuple[int, str, torch.UntypedStorage]] = {}
        self._problems: list[str] = []

    @property
    def problems(self) -> list[str]:
        """What is shared by stages, in words."""
        return self._problems

    def add(self, stage: int, module: nn.Module) -> bool:
        """Note the parameters of a stage as they are now, and return whether a stage before has some of them too.

        To be called again when the module has got other tensors.
        """
        has_shared = False
        for name, parameter in module.named_parameters():
            storage = local_tensor(parameter).untyped_storage()
            owner, owner_name, _ = self._owners.setdefault(id(storage), (stage, name, storage))
            if owner != stage:
                has_shared = True
                self._problems.append(
                    f"{owner_name} of stage {owner} and {name} of stage {stage} share memory, which they lose when "
                    f"stages are distributed. Give each stage a parameter of its own, and declare both under one key by "
                    f"tied_parameters()."
                )
        return has_shared


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tie:
    """A weight that several stages of the pipeline have, as one rank sees it."""

    key: str
    """Name of the tie."""
    ranks: tuple[int, ...]
    """``pp`` coordinates of the ranks with copies, ascending."""
    first_rank: int
    """The one with the lowest stage that has a copy."""
    own: tuple[tuple[int, str], ...]
    """Copies of this rank, in stage order: position of the stage on this rank, and parameter name. May be empty."""
    has_first: bool
    """Whether the first of these is the one of the lowest stage."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeight:
    """The copies of a weight that are on this rank, and where the others are."""

    key: str
    """Name of the tie."""
    copies: tuple[nn.Parameter, ...]
    """In stage order; at least one."""
    has_first: bool
    """Whether the first of them is the one of the lowest stage."""
    group: dist.ProcessGroup | None
    """The ranks that have copies of what this rank has. None if they are all here."""


@dataclasses.dataclass(frozen=True, slots=True)
class TiedParameters:
    """The tied weights of this rank, in an order in which all ranks have theirs."""

    weights: tuple[TiedWeight, ...] = ()
    """With ranks in common next to each other."""

    def uncounted(self) -> list[nn.Parameter]:
        """Return the copies that count in the norm elsewhere."""
        return [copy for weight in self.weights for copy in weight.copies[weight.has_first :]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """What a stage says about its copy of a tied weight."""

    key: str
    rank: int
    """``pp`` coordinate of the stage's rank."""
    stage: int
    names: tuple[str, ...]
    """All names of one parameter."""
    traits: Mapping[str, str]
    """What must be the same for all copies."""


def agree_on_ties(
    modules: Sequence[nn.Module], stages: Sequence[int], context: DistributedContext, memory: StageMemory
) -> list[Tie]:
    """Compare what all stages declare, on the meta device or later.

    All ranks must call it. One collective over the pipeline if there is one; it blocks the host.

    Args:
        modules: Stages of this rank, distributed.
        stages: Their indices in the pipeline.
        context: Topology of the job.
        memory: Has seen these stages.

    Returns:
        All ties of the pipeline, in the same order on all of its ranks.

    Raises:
        ValueError: On all ranks of the pipeline, with all problems that any of them has.
    """
    has_pipeline = context.mesh_params.has_pipeline_parallel
    own: list[_Copy] = []
    problems = list(memory.problems)
    rank = context.pipeline_group.rank() if has_pipeline else 0
    for module, stage in zip(modules, stages, strict=True):
        own += _declared_copies(module, stage, rank, problems)
    gathered = all_gather_object((own, problems), context.pipeline_group) if has_pipeline else [(own, problems)]
    by_key: dict[str, list[_Copy]] = {}
    for copy in sorted((copy for copies, _ in gathered for copy in copies), key=lambda copy: (copy.key, copy.stage)):
        by_key.setdefault(copy.key, []).append(copy)
    problems = [problem for _, of_rank in gathered for problem in of_rank]
    # On one process a model may use one parameter in both places, and declare it once.
    for key, copies in by_key.items() if has_pipeline else ():
        problems += _problems_of(key, copies)
    if problems:
        raise ValueError(f"tied parameters: {' '.join(problems)}")
    ties = [_tie_of(copies, rank, stages) for copies in by_key.values() if len(copies) > 1]
    return sorted(ties, key=lambda tie: (tie.ranks, tie.key))


def _declared_copies(module: nn.Module, stage: int, rank: int, problems: list[str]) -> list[_Copy]:
    """Return what a stage declares, once for each key, and append what is wrong with it."""
    if not isinstance(module, DeclaresTiedParameters):
        return []
    parameters = dict(module.named_parameters(remove_duplicate=False))
    names_of: dict[str, list[str]] = {}
    for name, key in module.tied_parameters().items():
        if name in parameters:
            names_of.setdefault(key, []).append(name)
        else:
            problems.append(
                f"tied_parameters() of stage {stage} names {name!r} for the key {key!r}, which is no parameter of it. "
                f"Use a name of named_parameters()."
            )
    copies: list[_Copy] = []
    for key, names in names_of.items():
        first, *others = names
        different = [name for name in others if parameters[name] is not parameters[first]]
        if different:
            problems.append(
                f"stage {stage} gives the key {key!r} to {first} and {', '.join(different)}, which are different "
                f"parameters. Within a stage assign one nn.Parameter to all of these attributes."
            )
        tied = parameters[first]
        all_names = tuple(name for name, parameter in parameters.items() if parameter is tied)
        copies.append(_Copy(key=key, rank=rank, stage=stage, names=all_names, traits=_traits_of(tied)))
    return copies


def _traits_of(parameter: nn.Parameter) -> dict[str, str]:
    return {
        "shape": str(tuple(parameter.shape)),
        "dtype": str(parameter.dtype),
        "requires_grad": str(parameter.requires_grad),
        "placements": _layout_of(parameter),
    }


def _layout_of(parameter: nn.Parameter) -> str:
    if not isinstance(parameter, DTensor):
        return "none"
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or range(mesh.ndim)
    parts = [
        f"{placement!r} over {name} ({mesh.size(dim)})"
        for dim, (name, placement) in enumerate(zip(names, parameter.placements, strict=True))
        if mesh.size(dim) > 1
    ]
    return " and ".join(parts) or "none"


def _problems_of(key: str, copies: Sequence[_Copy]) -> list[str]:
    """Say what is wrong with the copies of one weight."""
    first, *others = copies
    name, *further_names = first.names
    if not others and further_names:  # the cut has left the tie within a stage
        return []
    if not others:
        only = f"the key {key!r} is declared by stage {first.stage} for {name} only."
        return [f"{only} Declare it for each parameter that is a copy of the weight, in each stage that has one."]
    problems: list[str] = []
    for trait in first.traits:
        if len({copy.traits[trait] for copy in copies}) > 1:
            where = "; ".join(f"{copy.traits[trait]} in stage {copy.stage} ({copy.names[0]})" for copy in copies)
            problems.append(f"the copies of {key!r} differ in {trait}: {where}. They must have the same.")
    return problems


def _tie_of(copies: Sequence[_Copy], rank: int, stages: Sequence[int]) -> Tie:
    """Describe a tie as a rank sees it, from its copies in stage order."""
    own = [copy for copy in copies if copy.rank == rank]
    return Tie(
        key=copies[0].key,
        ranks=tuple(sorted({copy.rank for copy in copies})),
        first_rank=copies[0].rank,
        own=tuple((stages.index(copy.stage), copy.names[0]) for copy in own),
        has_first=bool(own) and own[0] is copies[0],
    )


@torch.no_grad()
def tie_parameters(modules: Sequence[nn.Module], ties: Sequence[Tie], context: DistributedContext) -> TiedParameters:
    """Give all copies of a weight the values of the lowest stage that has one.

    All ranks must call it, also those without a copy. It may create process groups.

    Args:
        modules: Stages of this rank, with memory and first values.
        ties: From `agree_on_ties`.
        context: Topology of the job.
    """
    # Not get_parameter(), which returns what a module computes with.
    parameters = [dict(module.named_parameters(remove_duplicate=False)) for module in modules]
    weights: list[TiedWeight] = []
    for tie in ties:
        group = context.pipeline_subgroup(tie.ranks) if len(tie.ranks) > 1 else None
        if not tie.own:
            continue
        copies = tuple(parameters[position][name] for position, name in tie.own)
        if group is not None:
            _broadcast(local_tensor(copies[0]), group, tie.ranks.index(tie.first_rank))
        for copy in copies[1:]:
            local_tensor(copy).copy_(local_tensor(copies[0]))
        weights.append(TiedWeight(key=tie.key, copies=copies, has_first=tie.has_first, group=group))
    return TiedParameters(tuple(weights))


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup, source: int) -> None:
    if not tensor.numel():  # an empty shard, on all of these ranks
        return
    values = tensor.contiguous()
    dist.broadcast(values, group=group, group_src=source)
    if values is not tensor:
        tensor.copy_(values)


class TiedGradients:
    """Sums the gradients of tied weights over their copies. See [Note: tied parameters].

    [Note: sums in place]
    Each weight is summed in the memory of its gradient, by a collective of its own: ties are few, mostly one, and among
    the largest tensors of a model, so that a common buffer would cost more than it saves. One small collective per
    group of ranks tells which weights have got a gradient anywhere. If none of the copies has one, they have None, as on
    one process. Only a rank that lacks a gradient looks, so the host waits for nothing in the common case.
    """

    def __init__(self, ties: TiedParameters, synchronizer: GradientSynchronizer) -> None:
        """Describe the gradients.

        Args:
            ties: What is tied. Frozen weights have no gradients to sum.
            synchronizer: Holds the gradients, and has finished its own sums whenever `sum` is called.
        """
        self._ties = ties
        self._synchronizer = synchronizer
        self._by_group: dict[dist.ProcessGroup | None, list[TiedWeight]] = {}
        for weight in ties.weights:
            if weight.copies[0].requires_grad:
                self._by_group.setdefault(weight.group, []).append(weight)

    def refuse_differences(self) -> None:
        """Refuse copies that have come to differ after the stages were built. All ranks that have ties must call it.

        Raises:
            ValueError: On all ranks that have copies of one of these weights.
        """
        by_group: dict[dist.ProcessGroup | None, list[TiedWeight]] = {}
        for weight in self._ties.weights:
            by_group.setdefault(weight.group, []).append(weight)
        for group, weights in by_group.items():
            own = {
                weight.key: {(copy.requires_grad, str(gradient_dtype(compute_leaf(copy)))) for copy in weight.copies}
                for weight in weights
            }
            gathered = [own] if group is None else all_gather_object(own, group)
            for key in own:
                found = {each for of_rank in gathered for each in of_rank[key]}
                if len(found) > 1:
                    raise ValueError(
                        f"the copies of the tied weight {key!r} differ in requires_grad or in the dtype of their "
                        f"gradients: {sorted(found)}. Freeze all of them or none, and set one grad_dtype."
                    )

    @torch.no_grad()
    def sum(self) -> None:
        """Give every copy the sum of all gradients. All ranks that have ties must call it, once per step."""
        for group, weights in self._by_group.items():
            for weight in self._used_anywhere(group, weights):
                gradients = [self._synchronizer.attach_gradient(copy) for copy in weight.copies]
                total, *others = gradients
                for other in others:
                    total.add_(other)
                if group is not None:
                    _sum_over(group, total)
                for other in others:
                    other.copy_(total)

    def _used_anywhere(self, group: dist.ProcessGroup | None, weights: list[TiedWeight]) -> list[TiedWeight]:
        """Return the weights of which any copy on any rank has a gradient. See [Note: sums in place]."""
        unused = [index for index, weight in enumerate(weights) if all(copy.grad is None for copy in weight.copies)]
        lacking = set(unused)
        if group is not None:
            was_used = torch.ones(len(weights), device=local_tensor(weights[0].copies[0]).device)
            if unused:
                was_used[unused] = 0
            dist.all_reduce(was_used, group=group)
            if unused:
                found = was_used[unused].tolist()
                lacking = {index for index, num_ranks in zip(unused, found, strict=True) if not num_ranks}
        return [weight for index, weight in enumerate(weights) if index not in lacking]


def _sum_over(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    if not tensor.numel():  # an empty shard, on all of these ranks
        return
    values = tensor.contiguous()
    dist.all_reduce(values, group=group)
    if values is not tensor:
        tensor.copy_(values)
