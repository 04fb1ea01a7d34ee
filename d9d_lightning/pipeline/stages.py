"""Cut a module into stages: which layers it calls, where it is cut, and one stage of it as a module."""

import contextlib
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Collection, Generator, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from d9d.core.device import random_state, set_random_state, synchronize
from d9d.core.module_names import matches, nearest
from d9d.core.pytree import tree_leaves, tree_map_only
from d9d.core.types import PyTree, TensorSpec
from d9d.pipelining.api import PipelineStageInfo, StageBoundary
from d9d_lightning.pipeline.call import CapturedCall
from d9d_lightning.pipeline.forward_check import ForwardCheck
from d9d_lightning.pipeline.stage_calls import LayerCalls, LayerRoute, PipelinedCall
from d9d_lightning.pipeline.stage_cut import (
    Ranges,
    balanced_ranges,
    find_layers,
    stages_by_layer,
    tied_problems,
    uncalled_modules,
    uncalled_problems,
    works_in_place,
)
from d9d_lightning.pipeline.stage_shapes import ContextFactory, StageShapes, TransferSpec, writable

__all__ = [
    "ForeignLayer",
    "PipelineStages",
    "StageModule",
    "build_stages",
    "keep_stages",
    "measure_layer_costs",
    "plan_cut",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStages:
    """How a module is cut into stages: which layers it calls one after another, and where it is cut.

    The module's forward pass must be ``x = layer(x)`` over the layers. See [Note: what a layer is called with] for the
    further arguments of the call.
    """

    layers: Sequence[str] | None = None
    """Names of the layers relative to the pipelined module, in calling order; patterns as of `fnmatch` for each part of a
    dotted name, such as ``["embed", "blocks.*", "norm", "head"]``. A layer that is called twice is named twice. None: the
    children of an ``nn.Sequential``."""
    with_arguments: Sequence[str] | None = None
    """Patterns of the layers that are called with all further arguments of the pipelined call, such as masks. None: each
    layer gets those whose names its ``forward`` has."""
    boundaries: Sequence[int] | None = None
    """Index of the first layer of the stages 1, 2 and so on. None: chosen, so that the most expensive stage is as cheap as
    possible."""
    balance: Literal["parameters", "layers"] = "parameters"
    """What a layer costs: its parameters, or all layers the same."""
    costs: Sequence[float] | None = None
    """Cost of each layer instead, in any unit; see `measure_layer_costs`."""
    transfer_spec: TransferSpec | None = None
    """Function of (stage, *arguments of the pipelined call) that describes what the stage sends to the next one, as a tree
    of `TensorSpec`. None: found by running the layers without data, once for each new shape of the call, which takes some
    milliseconds a layer. Layers whose output shapes depend on values need it."""
    checks_forward: bool = True
    """Whether the first calls hold the module's own ``forward`` against its layers, without data, and refuse one that does
    more than ``x = layer(x)``. False: for one whose further steps make no difference to the result."""

    def __post_init__(self) -> None:
        """Refuse what can not be meant, whatever the module is.

        Raises:
            ValueError: With all problems.
        """
        named = {"layers": self.layers, "with_arguments": self.with_arguments}
        problems = [
            f"{name} is the text {value!r}: give a list of patterns"
            for name, value in named.items()
            if isinstance(value, str)
        ]
        if self.boundaries is not None and self.costs is not None:
            problems.append("boundaries say where to cut, so costs have no effect: give one of them")
        if self.balance not in ("parameters", "layers"):
            problems.append(f"balance is {self.balance!r}, valid are 'parameters' and 'layers'")
        if self.costs is not None and not all(math.isfinite(cost) and cost >= 0 for cost in self.costs):
            problems.append(f"costs {list(self.costs)} must be finite and not negative")
        if problems:
            raise ValueError(f"PipelineStages: {'; '.join(problems)}.")


# Planning


def plan_cut(
    pipelined: nn.Module, spec: PipelineStages, num_stages: int, *, root: nn.Module | None = None
) -> tuple[tuple[str, ...], Ranges]:
    """Choose the layers of each stage. Changes nothing, and gives the same on all ranks.

    Args:
        pipelined: The whole module.
        spec: How to cut it.
        num_stages: Number of stages, over all ranks.
        root: What the pipelined module belongs to, such as the LightningModule, for weights tied to something outside.

    Returns:
        Names of the layers in calling order, and the half-open range of layers of each stage.

    Raises:
        ValueError: With all problems: unknown names, parameters that no layer has, too many stages, weights that a cut
            would tear apart.
    """
    names, problems = find_layers(pipelined, spec.layers)
    for pattern in spec.with_arguments or ():
        if names and not any(matches(name, pattern) for name in names):
            problems.append(f"with_arguments: {pattern!r} matches no layer{nearest(pattern, names)}")
    ranges: Ranges = ()
    if names:
        lazy = [name for name in dict.fromkeys(names) if _is_lazy(pipelined.get_submodule(name))]
        problems += [f"layer {name!r} has no shapes before its first call: give it its sizes" for name in lazy]
        ranges, size_problems = ((), []) if lazy else _choose_ranges(pipelined, names, spec, num_stages)
        problems += size_problems
        stages = stages_by_layer(names, ranges or ((0, len(names)),))
        problems += uncalled_problems(pipelined, stages)
        problems += tied_problems(pipelined, root, stages) if len(ranges) > 1 else []
        skipped = uncalled_modules(pipelined, stages)
        if skipped and not problems:
            rank_zero_warn(
                f"{', '.join(map(repr, skipped))} of {type(pipelined).__name__} are in no layer, so stages do not call them. "
                f"If its forward() does, name them in PipelineStages(layers=[...])."
            )
    elif not problems:
        problems.append(f"{type(pipelined).__name__} has no layers")
    if problems:
        raise ValueError("can not cut the pipelined module into stages: " + "; ".join(problems) + ".")
    return tuple(names), ranges


def _is_lazy(layer: nn.Module) -> bool:
    return any(is_lazy(tensor) for tensor in (*layer.parameters(), *layer.buffers()))


def _choose_ranges(
    pipelined: nn.Module, names: Sequence[str], spec: PipelineStages, num_stages: int
) -> tuple[Ranges, list[str]]:
    num_layers = len(names)
    if num_stages < 1:
        return (), [f"num_stages ({num_stages}) must be at least 1"]
    if spec.boundaries is not None:
        return _given_ranges(list(spec.boundaries), num_layers, num_stages)
    if spec.costs is not None and len(spec.costs) != num_layers:
        return (), [f"costs has {len(spec.costs)} values, but there are {num_layers} layers ({_listed(names)})"]
    if num_stages > num_layers:
        return (), [
            (
                f"{num_layers} layers ({_listed(names)}) can not fill {num_stages} stages: use 1 to {num_layers} stages "
                f"(pipeline_parallel x stages per rank of the schedule), or name smaller layers"
            )
        ]
    sizes = [sum(parameter.numel() for parameter in pipelined.get_submodule(name).parameters()) for name in names]
    by_parameters = spec.costs is None and spec.balance == "parameters"
    costs = spec.costs or (sizes if by_parameters else [1] * num_layers)
    is_enough = [size > 0 or not by_parameters for size in sizes]
    ranges = balanced_ranges(costs, num_stages, is_enough)
    if ranges is None:
        valid = f"use 1 to {sum(is_enough)} stages, or " if any(is_enough) else ""
        return (), [
            (
                f"only {sum(is_enough)} of {num_layers} layers have parameters, which can not give {num_stages} stages one "
                f"each: {valid}balance='layers' for stages without parameters"
            )
        ]
    return ranges, []


def _given_ranges(boundaries: list[int], num_layers: int, num_stages: int) -> tuple[Ranges, list[str]]:
    cuts = [0, *boundaries, num_layers]
    if len(boundaries) != num_stages - 1:
        return (), [
            (
                f"boundaries {boundaries} make {len(boundaries) + 1} stages, but the pipeline has {num_stages}: give "
                f"{num_stages - 1} of them"
            )
        ]
    if any(first >= second for first, second in itertools.pairwise(cuts)):
        return (), [
            f"boundaries {boundaries} leave a stage empty: they must ascend, from 1 to {num_layers - 1} ({num_layers} layers)"
        ]
    return tuple(itertools.pairwise(cuts)), []


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:4])}, ..., {', '.join(names[-2:])}"


# Cutting


class ForeignLayer(nn.Module):
    """Takes the place of a layer that another pipeline rank has, so that names, indices and lengths stay."""

    def __init__(self, name: str, stages: Collection[int]) -> None:
        """Say whose place it takes.

        Args:
            name: Name of the layer in the pipelined module.
            stages: The stages that have it.
        """
        super().__init__()
        self.layer_name = name
        """Name of the layer in the pipelined module."""
        self.stages = tuple(sorted(stages))
        """The stages that have it."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to run.

        Raises:
            RuntimeError: Always, with the stage that has the layer.
        """
        raise RuntimeError(
            f"{self._describe()} on another pipeline rank: call the pipelined module as a whole, once, and not its layers."
        )

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            where = self._describe() if "stages" in vars(self) else "the layer is"
            raise AttributeError(
                f"{where} on another pipeline rank, so that it has no attribute {name!r} here: read and change layers "
                f"before the Trainer starts, or on the rank that has them."
            ) from None

    @override
    def extra_repr(self) -> str:
        return f"{self.layer_name!r}, stages={self.stages}"

    def _describe(self) -> str:
        plural = "s" if len(self.stages) > 1 else ""
        return f"layer {self.layer_name!r} is in stage{plural} {', '.join(map(str, self.stages))}"


def keep_stages(
    pipelined: nn.Module, layer_names: Sequence[str], ranges: Ranges, own_stages: Collection[int]
) -> tuple[nn.Module, ...]:
    """Replace the layers of other stages by placeholders without parameters, in place.

    Names in the state dict stay those of the whole module; this rank has a part of them.

    Args:
        pipelined: The whole module.
        layer_names: Its layers in calling order.
        ranges: Layers of each stage.
        own_stages: The stages of this rank.

    Returns:
        What is in the place of each layer now, by the order of the names.
    """
    stages = stages_by_layer(layer_names, ranges)
    for name, hosts in stages.items():
        if hosts.isdisjoint(own_stages):
            parent_name, _, child_name = name.rpartition(".")
            pipelined.get_submodule(parent_name).add_module(child_name, ForeignLayer(name, hosts))
    return tuple(pipelined.get_submodule(name) for name in layer_names)


class StageModule(nn.Module):
    """One stage of a pipelined module: a `ModuleSupportsPipelining` of the engine.

    It has the layers as ``layers``, the same objects as in the pipelined module.
    """

    def __init__(
        self,
        info: PipelineStageInfo,
        layers: Sequence[nn.Module],
        first_layer: int,
        calls: LayerCalls,
        shapes: StageShapes,
        *,
        run_in: ContextFactory = contextlib.nullcontext,
    ) -> None:
        """Gather the layers of the stage.

        Args:
            info: Which stage it is.
            layers: Its layers in calling order.
            first_layer: Index of the first of them in the whole module.
            calls: What layers are called with.
            shapes: Knows what stages send.
            run_in: What the stage runs in.
        """
        super().__init__()
        self.info = info
        """Which stage it is."""
        self.layers = nn.ModuleList(layers)
        """The layers, in calling order."""
        self._in_order = tuple(layers)  # walking a ModuleList takes several times as long
        self._own = slice(first_layer, first_layer + len(layers))
        self._changes_input = not info.is_current_stage_first and works_in_place(layers[0])
        self._calls = calls
        self._shapes = shapes
        self._run_in = run_in

    # `Any`: what the user's layers take and give.
    @override
    def forward(self, inputs: PipelinedCall | PyTree[Any], shared: PipelinedCall) -> PyTree[Any]:
        """Run one microbatch through the layers.

        Args:
            inputs: The captured call on the first stage, what the stage before has sent on the others.
            shared: The captured call, for its further arguments.

        Returns:
            What the last layer returns.
        """
        routes = self._calls.routes(shared)
        value = self._calls.value(inputs) if self.info.is_current_stage_first else inputs
        if self._changes_input:
            value = writable(value)
        with self._run_in():
            for layer, route in zip(self._in_order, routes.layers[self._own], strict=True):
                value = layer(value) if route is None else route.run(layer, value, shared)
        if torch.is_grad_enabled() and not self.info.is_current_stage_last:
            return self._with_gradients(value)
        return value

    def _with_gradients(self, output: PyTree[Any]) -> PyTree[Any]:
        """Let the output of a frozen stage take gradients all the same.

        Stages agree once on what has gradients, and a callback may unfreeze the stage later.
        """
        if isinstance(output, torch.Tensor) and output.requires_grad:
            return output
        if all(parameter.requires_grad for parameter in self.parameters()):
            return output
        return tree_map_only(torch.Tensor, _requiring_grad, output)

    def further_arguments(self, call: PipelinedCall) -> list[Any]:
        """Return the arguments of the pipelined call but for the one that goes through the stages."""
        value = self._calls.value(call)
        return [each for each in (*call.args, *call.kwargs.values()) if each is not value]

    def stage_transfer_spec(self, pipeline_input: PipelinedCall, boundary: StageBoundary) -> PyTree[TensorSpec]:
        """Describe the tensors that cross a boundary of the stage, without running it; see `StageShapes.spec`.

        Args:
            pipeline_input: The captured call.
            boundary: The side of the stage that is asked about.
        """
        stage = self.info.current_stage
        return self._shapes.spec(stage if boundary is StageBoundary.outgoing else stage - 1, pipeline_input)


def build_stages(
    pipelined: nn.Module,
    spec: PipelineStages,
    layer_names: Sequence[str],
    ranges: Ranges,
    own_stages: Sequence[int],
    *,
    run_in: ContextFactory = contextlib.nullcontext,
) -> tuple[StageModule, ...]:
    """Cut a module in place, and return the stages of this rank in the order that was asked for.

    Args:
        pipelined: The whole module, as it will run (converted by the precision plugin), with its own ``forward``, not
            distributed yet. It may be on the meta device.
        spec: How to cut it.
        layer_names: From `plan_cut`.
        ranges: From `plan_cut`.
        own_stages: The stages of this rank.
        run_in: What stages run in, such as the ``forward_context`` of a precision plugin.
    """
    calls = LayerCalls(pipelined, layer_names, spec.with_arguments)
    shapes = StageShapes(
        pipelined,
        layer_names,
        ranges,
        calls,
        run_in=run_in,
        transfer_spec=spec.transfer_spec,
        forward_check=ForwardCheck(pipelined, layer_names, calls, run_in=run_in) if spec.checks_forward else None,
    )
    live = keep_stages(pipelined, layer_names, ranges, own_stages)
    shapes.follow(live)
    return tuple(
        StageModule(
            PipelineStageInfo(current_stage=stage, num_stages=len(ranges)),
            live[slice(*ranges[stage])],
            ranges[stage][0],
            calls,
            shapes,
            run_in=run_in,
        )
        for stage in own_stages
    )


def _requiring_grad(tensor: torch.Tensor) -> torch.Tensor:
    can_have = tensor.is_floating_point() or tensor.is_complex()
    return tensor if tensor.requires_grad or not can_have else tensor.detach().requires_grad_()


# Measuring


def measure_layer_costs(
    pipelined: nn.Module, spec: PipelineStages, *args: Any, num_repeats: int = 5, **kwargs: Any
) -> list[float]:
    """Measure how long each layer takes, forward and backward, for `PipelineStages.costs`.

    Waits for the device. Gradients, buffers and random states are as before afterwards.

    Args:
        pipelined: The whole module, on the device that it will train on.
        spec: Which layers it has.
        *args: Example arguments of the pipelined call.
        num_repeats: Number of runs, of which the median counts.
        **kwargs: Example keyword arguments of the pipelined call.

    Returns:
        Seconds per layer, in calling order.

    Raises:
        ValueError: See `plan_cut`.
    """
    names, _ = plan_cut(pipelined, spec, 1)
    call = CapturedCall(args, kwargs)
    calls = LayerCalls(pipelined, names, spec.with_arguments)
    routes = calls.routes(call).layers
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    device = tensors[0].device if tensors else torch.device("cpu")
    value = tree_map_only(torch.Tensor, torch.Tensor.detach, calls.value(call))
    costs: list[float] = []
    with _unchanged(pipelined, device), torch.enable_grad():
        for name, route in zip(names, routes, strict=True):
            layer = pipelined.get_submodule(name)
            _, output = _timed(layer, route, value, call, device)  # warms up
            costs.append(statistics.median(_timed(layer, route, value, call, device)[0] for _ in range(num_repeats)))
            value = output
    return costs


def _timed(
    layer: nn.Module, route: LayerRoute | None, value: PyTree[Any], call: CapturedCall, device: torch.device
) -> tuple[float, PyTree[Any]]:
    """Run a layer forward and backward, and return the seconds and its output without graph."""
    value = tree_map_only(torch.Tensor, _as_leaf, value)
    if works_in_place(layer):
        value = writable(value)
    synchronize(device)
    start_s = time.perf_counter()
    output = layer(value) if route is None else route.run(layer, value, call)
    roots = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    synchronize(device)
    return time.perf_counter() - start_s, tree_map_only(torch.Tensor, torch.Tensor.detach, output)


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


@contextlib.contextmanager
def _unchanged(module: nn.Module, device: torch.device) -> Generator[None]:
    """Put gradients, buffers and random states back afterwards."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    state = random_state(device)
    try:
        with isolate_rng(include_cuda=False):
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        set_random_state(device, state)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
