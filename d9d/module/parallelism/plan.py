"""Pattern plans: which submodules a plan names, what it says about each, and whether that can be."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, TypeAlias

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ParallelStyle

from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.core.module_names import collapse_numbers, did_you_mean, matches, nearest
from d9d.core.protocol import MixesTokens
from d9d.core.yaml_file import read_yaml
from d9d.module.parallelism.fused import FusedColwiseParallel
from d9d.module.parallelism.plan_words import (
    CLOSING_WORD,
    CONTEXT_WORDS,
    DATA_WORDS,
    EXPERT_WORD,
    OPENING_WORDS,
    SEQUENCE_WORD,
    WORDS,
    Choice,
    Placement,
    layer_problems,
    likely_word,
    size_problems,
)
from d9d.module.parallelism.tensor import SplitsItself
from d9d.module.parallelism.units import repeated_blocks, wrap_by_size

Parallelize: TypeAlias = (
    Callable[[nn.Module, DistributedContext], None] | Mapping[str, Placement | ParallelStyle] | str | None
)
"""How to distribute a module: a function, placements by name pattern, a YAML file of them, or None for the default."""

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
class ResolvedPlan:
    """A pattern plan for one module; a submodule may have a placement over the data-parallel ranks and a split."""

    splits: Mapping[str, Choice]
    """Layers to split over tensor-parallel or expert-parallel ranks, by name; empty where there is one such rank only."""
    placements: Mapping[str, Choice] | None
    """Placements over the data-parallel ranks, by name. None: the plan says nothing of them, as the default does."""
    contexts: Mapping[str, Choice]
    """Submodules whose attention sees the tokens of all context-parallel ranks, by name; empty where there is one such rank."""
    units: tuple[nn.Module, ...]
    """The FSDP units of the default: the blocks that the module repeats, or else submodules of some size."""

    def of_stage(self, stage: nn.Module) -> "ResolvedPlan":
        """Return the plan for a stage that was built by itself, whose layers have the names they have in the whole module.

        Raises:
            ValueError: If the plan names layers and the stage has none of these names: nothing would be distributed.
        """
        layers = dict(stage.named_modules())
        names = {*self.splits, *(self.placements or {})}
        if names and not names & layers.keys():
            raise ValueError(
                f"parallelize: the stage has none of the {len(names)} layers that the plan names, such as {min(names)!r}. Its "
                f"layers must have the names of the whole model; its own begin with {', '.join(list(layers)[1:4])}."
            )

        def there(choices: Mapping[str, Choice]) -> dict[str, Choice]:
            return {
                name: dataclasses.replace(choice, module=layers[name])
                for name, choice in choices.items()
                if name in layers
            }

        return ResolvedPlan(
            splits=there(self.splits),
            placements=None if self.placements is None else there(self.placements),
            contexts=there(self.contexts),
            units=tuple(repeated_blocks(stage)) if self.units else (),
        )

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether tensor-parallel ranks have parts of the tokens between blocks. See [Note: words for blocks]."""
        return any(choice.value == SEQUENCE_WORD for choice in self.splits.values())


def read_plan(parallelize: Parallelize) -> Parallelize:
    """Read a plan that is given as the path of a YAML file; anything else is returned as it is.

    The file is a mapping of patterns to words, or has it under ``patterns``.

    Raises:
        ValueError: If the file is no such mapping, or cannot be read.
    """
    if not isinstance(parallelize, str | os.PathLike):
        return parallelize
    try:
        content: object = read_yaml(Path(parallelize))
    except OSError as error:
        raise ValueError(
            f"parallelize: {error}. A text is the path of a YAML file; words belong into a mapping, such as "
            f"{{'blocks.*': 'shard'}}."
        ) from error
    except ValueError as error:
        raise ValueError(f"parallelize: {error}") from error
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
    nested = [key for key, value in content.items() if isinstance(value, dict)]
    if nested:
        raise ValueError(
            f"parallelize: {os.fspath(parallelize)} has a mapping under {', '.join(map(repr, nested))}. Patterns may be at the "
            f"top or under 'patterns'.{did_you_mean(nested[0], ['patterns'])}"
        )
    return content


def word_problems(parallelize: object) -> list[str]:
    """Say which patterns and words of a plan are none, whatever the module."""
    problems: list[str] = []
    for pattern, value in parallelize.items() if isinstance(parallelize, Mapping) else ():
        if not isinstance(pattern, str):
            problems.append(f"{pattern!r} is no pattern of submodule names, such as 'blocks.*'")
        if not isinstance(FusedColwiseParallel.parse(value) or value, ParallelStyle) and value not in WORDS:
            problems.append(
                f"{pattern!r}: unknown placement {value!r}.{did_you_mean(value, WORDS)} Valid are {', '.join(WORDS)}, "
                f"colwise_fused(8, 2, 2)"
            )
    return problems


def resolve_plan(module: nn.Module, plan: ParallelPlan, params: DeviceMeshParameters) -> ResolvedPlan:
    """Find the submodules that a pattern plan, or the default, is about. Not collective.

    On a module that is to be cut into stages, call it before the cut: it must have all layers.

    Args:
        module: The whole module, not distributed yet.
        plan: What the user has said. A function is not resolved.
        params: Parallelism degrees.

    Raises:
        ValueError: With all that is wrong with the plan.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    data, splits, contexts, problems = _choose(modules, plan)
    problems += _split_problems(splits, modules, params)
    if params.has_tensor_parallel:
        if all(choice.value == EXPERT_WORD for choice in splits.values()):
            problems.append(_how_to_split(module, params.tensor_parallel))
        problems += _sequence_problems(splits, module)
    if params.has_expert_parallel and all(choice.value != EXPERT_WORD for choice in splits.values()):
        problems.append(_how_to_share_experts(module, params.expert_parallel))
    problems += _context_problems(contexts, module, params)
    if problems:
        raise ValueError(f"parallelize: {'. '.join(problems)}.")
    return ResolvedPlan(
        splits=_in_use(splits, params),
        placements=data or None,
        contexts=contexts if params.context_parallel > 1 else {},
        units=tuple(repeated_blocks(module) or wrap_by_size(module, plan.min_unit_params)),
    )


def rules_of(module: nn.Module, plan: ParallelPlan, params: DeviceMeshParameters) -> ResolvedPlan:
    """Find what `resolve_plan` has found, on a module that was distributed and perhaps cut since. Nothing is checked."""
    data, splits, contexts, _ = _choose(dict(module.named_modules(remove_duplicate=False)), plan)
    return ResolvedPlan(splits=_in_use(splits, params), placements=data or None, contexts=contexts, units=())


def _in_use(splits: Mapping[str, Choice], params: DeviceMeshParameters) -> dict[str, Choice]:
    """Leave out what the mesh has no ranks for."""
    return {
        name: choice
        for name, choice in splits.items()
        if params.has_tensor_parallel or (choice.value == EXPERT_WORD and params.has_expert_parallel)
    }


def _choose(
    modules: _Modules, plan: ParallelPlan
) -> tuple[dict[str, Choice], dict[str, Choice], dict[str, Choice], list[str]]:
    """Return placements, splits and what sees the tokens of all ranks, by name, and what is wrong with patterns and words."""
    patterns = plan.parallelize if isinstance(plan.parallelize, Mapping) else {}
    problems = word_problems(patterns)
    data: dict[str, Choice] = {}
    splits: dict[str, Choice] = {}
    contexts: dict[str, Choice] = {}
    for pattern, value in patterns.items():
        if not isinstance(pattern, str):
            continue  # named among the problems
        value = FusedColwiseParallel.parse(value) or value
        found = [name for name in modules if _is_named(name, pattern)]
        if not found:
            problems.append(f"{pattern!r} matches no submodule{nearest(pattern, list(modules))}")
        chosen = data if value in DATA_WORDS else contexts if value in CONTEXT_WORDS else splits
        for name in found:
            chosen.setdefault(name, Choice(module=modules[name], pattern=pattern, value=value))
    return data, splits, contexts, problems


def _is_named(name: str, pattern: str) -> bool:
    """Match a name as it is, and as it would be if no module was wrapped by ``torch.compile``."""
    if matches(name, pattern):
        return True
    return not name.endswith(_COMPILED) and matches(name.replace(f"{_COMPILED}.", ""), pattern)


def _split_problems(splits: Mapping[str, Choice], modules: _Modules, params: DeviceMeshParameters) -> list[str]:
    """Say which layers cannot be split as a plan says; blocks that repeat are named once."""
    by_layer: dict[str, tuple[str, str]] = {}
    for name, choice in splits.items():
        if choice.value not in WORDS and not isinstance(choice.value, FusedColwiseParallel):
            continue
        has_any_size = _takes_dtensor(name, splits, modules)
        found = list(layer_problems(choice)) or [
            *(() if has_any_size else size_problems(choice, params.tensor_parallel, params.expert_parallel)),
            *_unpaired(name, splits, modules),
            *_nested(name, splits),
        ]
        if found:
            by_layer[name] = (choice.pattern, "; ".join(found))
    groups = collapse_numbers(by_layer)
    reasons = [(group.name, *by_layer[group.members[0]]) for group in groups]
    return [f"{pattern!r} splits {name}, which {reason}" for name, pattern, reason in reasons]


def _nested(name: str, splits: Mapping[str, Choice]) -> Iterator[str]:
    outer = name
    while outer:
        outer = outer.rpartition(".")[0]
        if outer in splits:
            yield f"is inside of {outer!r}, all of which {splits[outer].word!r} splits"


def _is_within(name: str, choices: Mapping[str, Choice]) -> bool:
    return any(not outer or name == outer or name.startswith(f"{outer}.") for outer in choices)


def _context_problems(contexts: Mapping[str, Choice], module: nn.Module, params: DeviceMeshParameters) -> list[str]:
    """Say what would take the tokens of this rank for whole sequences."""
    if params.context_parallel == 1:
        return []
    nested = {
        name: "" for name in contexts if _is_within(name, {key: contexts[key] for key in contexts if key != name})
    }
    forgotten = {
        name: ""
        for name, child in module.named_modules()
        if isinstance(child, MixesTokens)
        and child.context_parallel_degree is not None
        and not _is_within(name, contexts)
    }
    problems: list[str] = []
    if nested:
        names = ", ".join(group.name for group in collapse_numbers(nested))
        problems.append(f"{names} are inside of others that 'context' is for too: name the inner or the outer ones")
    if forgotten:
        names = ", ".join(group.name for group in collapse_numbers(forgotten))
        problems.append(
            f"sequences are cut over {params.context_parallel} context-parallel ranks, but {names} would see, or count for router "
            f"losses, the tokens of their own rank alone: name blocks around them with 'context', such as {{'layers.*': 'context'}}"
        )
    return problems


def _sequence_problems(splits: Mapping[str, Choice], module: nn.Module) -> list[str]:
    """Say what would see a part of the tokens without knowing it: gradients would be those of the part."""
    if all(choice.value != SEQUENCE_WORD for choice in splits.values()):
        return []
    single = {
        name: choice.word
        for name, choice in splits.items()
        if isinstance(choice.module, nn.Linear | nn.Embedding | SplitsItself)
    }
    inside = {parameter for choice in splits.values() for parameter in choice.module.parameters()}
    whole = {
        name: "" for name, parameter in module.named_parameters() if parameter.requires_grad and parameter not in inside
    }
    dropouts = {
        name: ""
        for name, child in module.named_modules()
        if isinstance(child, nn.Dropout) and child.p > 0 and not _is_within(name, splits)
    }
    problems: list[str] = []
    if dropouts:
        names = ", ".join(group.name for group in collapse_numbers(dropouts))
        problems.append(
            f"with 'sequence' ranks have parts of the tokens, but {names} would drop the same of each part: use 'dropout'"
        )
    if single:
        names = ", ".join(group.name for group in collapse_numbers(single))
        problems.append(
            f"'sequence' is for plans of whole blocks ('attention', 'ffn', 'vocab', 'expert'), but {names} are layers"
        )
    if whole:
        names = ", ".join(group.name for group in collapse_numbers(whole))
        problems.append(
            f"with 'sequence' every parameter must belong to something that the plan names, but these do not: {names}"
        )
    return problems


def _unpaired(name: str, splits: Mapping[str, Choice], modules: _Modules) -> Iterator[str]:
    """Tell of a layer that leaves, or takes, a part of the features where no layer of the other kind is near.

    Nothing would fail there, and something else would be computed.
    """
    word = splits[name].value
    opens = word == "colwise" or isinstance(word, FusedColwiseParallel)
    if not opens and word != CLOSING_WORD:
        return
    others = (CLOSING_WORD,) if opens else OPENING_WORDS
    for other, its in splits.items():
        if isinstance(its.value, FusedColwiseParallel):
            is_other_kind = not opens
        else:
            is_other_kind = isinstance(its.value, ParallelStyle) or its.value in others
        if is_other_kind and _are_near(name, other, modules):
            return
    if opens:
        yield "leaves a part of its output on each rank, but no layer beside it is 'rowwise': use 'colwise_gather'"
    else:
        yield "takes a part of its input on each rank, but no layer beside it is 'colwise': use 'rowwise_split'"


def _takes_dtensor(name: str, splits: Mapping[str, Choice], modules: _Modules) -> bool:
    """Tell whether the features that a layer takes come in a DTensor, whose parts may be uneven. What fits not, torch refuses."""
    return splits[name].value == CLOSING_WORD and any(
        its.value == "colwise_dtensor" and _are_near(name, other, modules) for other, its in splits.items()
    )


def _are_near(name: str, other: str, modules: _Modules) -> bool:
    """Tell whether two layers belong to one block: at most two levels below a module that is no list of blocks."""
    one, two = name.split("."), other.split(".")
    num_shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))
    block = modules[".".join(one[:num_shared])]
    return max(len(one), len(two)) - num_shared <= _BLOCK_DEPTH and not isinstance(block, nn.ModuleList | nn.ModuleDict)


def _how_to_split(module: nn.Module, degree: int) -> str:
    """Tell what a plan could name, by listing the layers."""
    blocks = {name: word for name, child in module.named_modules() if (word := likely_word(child)) is not None}
    inside = tuple(f"{name}." for name in blocks)
    sizes = {
        name: f"{child.in_features} -> {child.out_features}"
        for name, child in module.named_modules()
        if isinstance(child, nn.Linear) and not name.startswith(inside)
    }
    listed = [f"{group.name} ({blocks[group.members[0]]!r})" for group in collapse_numbers(blocks)]
    listed += [f"{group.name} ({sizes[group.members[0]]})" for group in collapse_numbers(sizes)]
    shown = ", ".join(listed[:12]) + (f" and {len(listed) - 12} more" if len(listed) > 12 else "")
    return (
        f"tensor_parallel is {degree}, and nothing says which layers to split, so that its ranks would all do the same. "
        f"Give a plan such as {{'blocks.*.up': 'colwise', 'blocks.*.down': 'rowwise'}}, or set tensor_parallel to 1. "
        f"Layers of {type(module).__name__}: {shown or 'none'}"
    )


def _how_to_share_experts(module: nn.Module, degree: int) -> str:
    layers = {name: "" for name, child in module.named_modules() if likely_word(child) == EXPERT_WORD}
    shown = ", ".join(group.name for group in collapse_numbers(layers))
    return (
        f"expert_parallel is {degree}, and nothing says which layers have experts to share. Give a plan such as "
        f"{{'layers.*.moe': 'expert'}}, or set expert_parallel to 1. Layers with experts in {type(module).__name__}: "
        f"{shown or 'none'}"
    )
