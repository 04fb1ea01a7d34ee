"""Pattern plans: which submodules a plan names, what it says about each, and whether that can be."""

import dataclasses
import difflib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, get_args

import yaml
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.module.parallelism.units import repeated_blocks, wrap_by_size
from d9d_lightning.pipeline.stage_cut import matches, nearest
from d9d_lightning.placements.names import collapse_numbers

DataPlacement: TypeAlias = Literal["replicate", "shard", "hsdp"]
"""Where the parameters of a submodule are over the data-parallel ranks; "hsdp" is another word for "shard"."""

LayerSplit: TypeAlias = Literal["colwise", "colwise_gather", "colwise_dtensor", "rowwise", "rowwise_split", "vocab"]
"""How a layer is split over the tensor-parallel ranks.

- "colwise": a Linear (or Embedding) computes a part of its output features on each rank. The code behind it sees that part.
- "colwise_gather": the same, and the output is put together again.
- "colwise_dtensor": the same as "colwise", but the code behind it sees a DTensor of the whole shape.
- "rowwise": a Linear takes a part of its input features on each rank, as "colwise" leaves them; the outputs are summed.
- "rowwise_split": the same for an input that every rank has whole.
- "vocab": an Embedding holds a part of its rows on each rank; the outputs are summed.
"""

Placement: TypeAlias = DataPlacement | LayerSplit
Parallelize: TypeAlias = (
    Callable[[nn.Module, DistributedContext], None] | Mapping[str, Placement | ParallelStyle] | str | None
)
"""How to distribute a module: a function, placements by name pattern, a YAML file of them, or None for the default."""

_DATA_WORDS = get_args(DataPlacement)
_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_dtensor": lambda: ColwiseParallel(use_local_output=False),
    "rowwise": RowwiseParallel,
    "rowwise_split": lambda: RowwiseParallel(input_layouts=Replicate()),
    "vocab": lambda: RowwiseParallel(input_layouts=Replicate()),
}
_LAYERS: Mapping[str, tuple[type[nn.Module], ...]] = {
    "colwise": (nn.Linear, nn.Embedding),
    "colwise_gather": (nn.Linear, nn.Embedding),
    "colwise_dtensor": (nn.Linear, nn.Embedding),
    "rowwise": (nn.Linear,),
    "rowwise_split": (nn.Linear,),
    "vocab": (nn.Embedding,),
}
"""The classes of layers that each word splits."""

_WORDS = (*_DATA_WORDS, *_STYLES)

_OPENING = ("colwise", "colwise_dtensor")
_CLOSING = "rowwise"
_BLOCK_DEPTH = 2
"""How far below a block its layers may be: ``attn.q`` and ``attn.out.linear`` belong together."""

_COMPILED = "_orig_mod"
"""Under this name a module wrapped by ``torch.compile`` has the original."""

_Modules: TypeAlias = Mapping[str, nn.Module]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """How to distribute a module, as the user has said it."""

    parallelize: Parallelize
    """See `Parallelize`; a file is read already, see `read_plan`."""
    min_unit_params: int
    """Smallest FSDP unit of the default plan where no block repeats, in parameters."""
    fsdp_kwargs: Mapping[str, Any]  # torch's own arguments, passed through
    """``mp_policy`` and ``reshard_after_forward`` of ``fully_shard``."""

    @classmethod
    def read(
        cls,
        parallelize: Parallelize,
        min_unit_params: int,
        mp_policy: MixedPrecisionPolicy | None,
        reshard_after_forward: bool | int | None,
    ) -> Self:
        """Take what a user has written; see `read_plan`."""
        fsdp_kwargs: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
        if mp_policy is not None:
            fsdp_kwargs["mp_policy"] = mp_policy
        return cls(parallelize=read_plan(parallelize), min_unit_params=min_unit_params, fsdp_kwargs=fsdp_kwargs)

    @property
    def has_mp_policy(self) -> bool:
        """Whether FSDP is to convert types itself."""
        return "mp_policy" in self.fsdp_kwargs

    @property
    def stays_gathered(self) -> bool:
        """Whether FSDP may keep parameters gathered while batches accumulate."""
        return self.fsdp_kwargs["reshard_after_forward"] is None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a plan says about one submodule."""

    module: nn.Module
    """The submodule."""
    pattern: str
    """The pattern that has named it."""
    value: Placement | ParallelStyle
    """A word, or one of torch's styles."""

    @property
    def style(self) -> ParallelStyle:
        """The torch style that splits the layer."""
        return self.value if isinstance(self.value, ParallelStyle) else _STYLES[self.value]()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedPlan:
    """A pattern plan for one module; a submodule may have a placement over the data-parallel ranks and a split."""

    splits: Mapping[str, Choice]
    """Layers to split over the tensor-parallel ranks, by name; empty where there is one such rank only."""
    placements: Mapping[str, Choice] | None
    """Placements over the data-parallel ranks, by name. None: the plan says nothing of them, as the default does."""
    units: tuple[nn.Module, ...]
    """The FSDP units of the default: the blocks that the module repeats, or else submodules of some size."""


def read_plan(parallelize: Parallelize) -> Parallelize:
    """Read a plan that is given as the path of a YAML file; anything else is returned as it is.

    The file is a mapping of patterns to words, or has it under ``patterns``.

    Raises:
        ValueError: If the file is no such mapping.
        OSError: If it cannot be read.
    """
    if not isinstance(parallelize, str | os.PathLike):
        return parallelize
    try:
        content: object = yaml.safe_load(Path(parallelize).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"parallelize: {os.fspath(parallelize)} is no YAML file: {error}") from error
    if isinstance(content, dict) and isinstance(content.get("patterns"), dict):
        if len(content) > 1:
            others = ", ".join(repr(key) for key in content if key != "patterns")
            raise ValueError(f"parallelize: {os.fspath(parallelize)} has {others} beside 'patterns'. Remove them.")
        content = content["patterns"]
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(
            f"parallelize: {os.fspath(parallelize)} must map patterns of submodule names to placements, such as "
            f"'blocks.*': shard, at the top or under 'patterns'."
        )
    return content


def resolve_plan(module: nn.Module, plan: ParallelPlan, params: DeviceMeshParameters) -> ResolvedPlan:
    """Find the submodules that a pattern plan, or the default, is about. Not collective.

    On a module that is to be cut into stages, call it before the cut: it must have all layers.

    Args:
        module: The LightningModule, not distributed yet.
        plan: What the user has said. A function is not resolved.
        params: Parallelism degrees.

    Raises:
        ValueError: With all that is wrong with the plan.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    data, splits, problems = _choose(modules, plan)
    problems += _split_problems(splits, modules, params.tensor_parallel)
    if not splits and params.has_tensor_parallel:
        problems.append(_how_to_split(module, params.tensor_parallel))
    if problems:
        raise ValueError(f"parallelize: {'. '.join(problems)}.")
    units = repeated_blocks(module) or wrap_by_size(module, plan.min_unit_params)
    return ResolvedPlan(
        splits=splits if params.has_tensor_parallel else {}, placements=data or None, units=tuple(units)
    )


def rules_of(module: nn.Module, plan: ParallelPlan, params: DeviceMeshParameters) -> ResolvedPlan:
    """Find what `resolve_plan` has found, on a module that was distributed and perhaps cut since. Nothing is checked."""
    data, splits, _ = _choose(dict(module.named_modules(remove_duplicate=False)), plan)
    return ResolvedPlan(splits=splits if params.has_tensor_parallel else {}, placements=data or None, units=())


def _choose(modules: _Modules, plan: ParallelPlan) -> tuple[dict[str, Choice], dict[str, Choice], list[str]]:
    """Return the placements and the splits by name, and what is wrong with patterns and words."""
    patterns = plan.parallelize if isinstance(plan.parallelize, Mapping) else {}
    problems: list[str] = []
    data: dict[str, Choice] = {}
    splits: dict[str, Choice] = {}
    for pattern, value in patterns.items():
        if not isinstance(value, ParallelStyle) and value not in _WORDS:
            near = difflib.get_close_matches(str(value), _WORDS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            problems.append(f"{pattern!r}: unknown placement {value!r}{hint}, valid are {', '.join(_WORDS)}")
        found = [name for name in modules if _is_named(name, pattern)]
        if not found:
            problems.append(f"{pattern!r} matches no submodule{nearest(pattern, list(modules))}")
        chosen = data if value in _DATA_WORDS else splits
        for name in found:
            chosen.setdefault(name, Choice(module=modules[name], pattern=pattern, value=value))
    return data, splits, problems


def _is_named(name: str, pattern: str) -> bool:
    """Match a name as it is, and as it would be if no module was wrapped by ``torch.compile``."""
    if matches(name, pattern):
        return True
    return not name.endswith(_COMPILED) and matches(name.replace(f"{_COMPILED}.", ""), pattern)


def cut_dims(choice: Choice) -> Mapping[str, int | None]:
    """Return the tensor dimension along which a word cuts each parameter of its layer, None where it does not.

    Empty for styles of torch, which know themselves.
    """
    match choice.value:
        case "colwise" | "colwise_gather" | "colwise_dtensor":
            is_embedding = isinstance(choice.module, nn.Embedding)
            return {"weight": 1} if is_embedding else {"weight": 0, "bias": 0}
        case "rowwise" | "rowwise_split":
            return {"weight": 1, "bias": None}
        case "vocab":
            return {"weight": 0}
        case _:
            return {}


def _split_problems(splits: Mapping[str, Choice], modules: _Modules, degree: int) -> list[str]:
    """Say which layers cannot be split as a plan says; blocks that repeat are named once."""
    by_layer: dict[str, tuple[str, str]] = {}
    for name, choice in splits.items():
        if isinstance(choice.value, ParallelStyle) or choice.value not in _STYLES:
            continue
        found = list(_layer_problems(choice)) or [*_size_problems(choice, degree), *_unpaired(name, splits, modules)]
        if found:
            by_layer[name] = (choice.pattern, "; ".join(found))
    groups = collapse_numbers(by_layer)
    reasons = [(group.name, *by_layer[group.members[0]]) for group in groups]
    return [f"{pattern!r} splits {name}, which {reason}" for name, pattern, reason in reasons]


def _layer_problems(choice: Choice) -> Iterator[str]:
    layer, classes = choice.module, _LAYERS[str(choice.value)]
    if not isinstance(layer, classes):
        wanted = " or ".join(f"nn.{each.__name__}" for each in classes)
        yield f"is a {type(layer).__name__}, but {choice.value!r} is for {wanted}"
    elif any(True for _ in layer.children()):
        yield f"has submodules of its own: name the {type(layer).__name__} among them"
    elif isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.sparse):
        yield "has max_norm or sparse gradients, and a split embedding cannot have them"


def _size_problems(choice: Choice, degree: int) -> Iterator[str]:
    """Between "colwise" and "rowwise" each rank has a plain tensor, and torch takes all of them to be of one size."""
    dim = cut_dims(choice)["weight"]
    if choice.value not in (*_OPENING, _CLOSING) or dim is None:
        return
    size = choice.module.get_parameter("weight").size(dim)
    if size % degree:
        valid = [str(divisor) for divisor in range(1, size + 1) if size % divisor == 0]
        shown = ", ".join(valid[:8]) + (", ..." if len(valid) > 8 else "")
        yield (
            f"has {size} features to split, which tensor_parallel ({degree}) does not divide: valid degrees are {shown}, "
            f"and 'colwise_gather' and 'rowwise_split' take any"
        )


def _unpaired(name: str, splits: Mapping[str, Choice], modules: _Modules) -> Iterator[str]:
    """Tell of a layer that leaves, or takes, a part of the features where no layer of the other kind is near.

    Nothing would fail there, and something else would be computed.
    """
    word = splits[name].value
    if word not in ("colwise", _CLOSING):
        return
    others = (_CLOSING,) if word == "colwise" else _OPENING
    for other, its in splits.items():
        is_other_kind = isinstance(its.value, ParallelStyle) or its.value in others
        if is_other_kind and _are_near(name, other, modules):
            return
    if word == "colwise":
        yield "leaves a part of its output on each rank, but no layer beside it is 'rowwise': use 'colwise_gather'"
    else:
        yield "takes a part of its input on each rank, but no layer beside it is 'colwise': use 'rowwise_split'"


def _are_near(name: str, other: str, modules: _Modules) -> bool:
    """Tell whether two layers belong to one block: at most two levels below a module that is no list of blocks."""
    one, two = name.split("."), other.split(".")
    num_shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
    block = modules[".".join(one[:num_shared])]
    return max(len(one), len(two)) - num_shared <= _BLOCK_DEPTH and not isinstance(block, nn.ModuleList | nn.ModuleDict)


def _how_to_split(module: nn.Module, degree: int) -> str:
    """Tell what a plan could name, by listing the layers."""
    sizes = {
        name: f"{child.in_features} -> {child.out_features}"
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear)
    }
    listed = [f"{group.name} ({sizes[group.members[0]]})" for group in collapse_numbers(sizes)]
    shown = ", ".join(listed[:12]) + (f" and {len(listed) - 12} more" if len(listed) > 12 else "")
    return (
        f"tensor_parallel is {degree}, and nothing says which layers to split, so that its ranks would all do the same. "
        f"Give a plan such as {{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}}, or set tensor_parallel to 1. "
        f"Linear layers of {type(module).__name__}: {shown or 'none'}"
    )
