"""The backward pass of a pipeline stage, whole or in two halves: gradients of inputs now, gradients of weights later.

[Note: Split backward pass]

Zero-bubble schedules send the gradients of a stage's inputs as early as possible and fill gaps with the gradients of its
weights (source: "Zero Bubble Pipeline Parallelism", https://arxiv.org/abs/2401.10241, section 2). The graph of a stage
falls into nodes *on the path*, from which an input can be reached, and the rest, which leads to parameters only.

The input half is one run of the engine that asks for the inputs. The engine computes nothing that leads elsewhere, so
matrix products skip the product for the weight. Each of them keeps instead its saved activation and the gradient that it
receives, and the weight half multiplies them. All else that leaves the path is asked for too: norm weights, because they
are cheap; convolutions, compiled regions, checkpointed or offloaded layers, because they compute all at once or would
have to recompute or load twice. These gradients wait where they left the path. The weight half feeds everything into the
part off the path, from where it accumulates into the parameters as in a full pass. A stage that consists of compiled or
checkpointed regions gains nothing from the split and keeps a set of gradients for each pass between its halves.

Gradients are recorded by hooks of the nodes and not captured by the engine, since it captures a gradient before the
tensor hooks of a node have seen it if the node runs, and after that if it does not.

Python functions that leave the path run with `GradDirection.inputs`. What they withhold then, they are asked for in the
weight half with `GradDirection.weight`; a function that does not ask what is wanted withholds nothing.

The forward pass and both halves belong on the same stream: the weight half reads what nodes have left on theirs.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import (
    GradientEdge,
    Node,
    _engine_run_backward,  # pyright: ignore[reportPrivateUsage]  # checked with torch 2.11, 2.13 and 2.14
    get_gradient_edge,
)

from d9d.core.autograd import GLOBAL_GRAD_CONTEXT, GradDirection
from d9d.core.placement import local_tensor

from .weight_gradients import (
    ACCUMULATE_GRAD,
    GEMM_RULES,
    DeferredGemm,
    FunctionReplay,
    KnownGradient,
    SavedContext,
    WeightGradients,
    WeightWork,
    leaf_of,
    plan_gemm,
)

StageOutput = torch.Tensor | GradientEdge
"""An output, or the edge that `torch.autograd.graph.get_gradient_edge` gives for it, if its memory is not to be held."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackwardInputResult:
    """What the input half of a backward pass gives."""

    input_grads: list[torch.Tensor | None]
    """One for each input; None where none is wanted or none arrives."""
    param_groups: WeightGradients
    """What `stage_backward_weight` takes."""


_Grads = Sequence[torch.Tensor | None]


def stage_backward_full(
    outputs: Sequence[StageOutput | None],
    output_grads: Sequence[torch.Tensor | None] | None,
    inputs: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Run the whole backward pass: accumulate into the parameters and return the gradients of the inputs.

    Args:
        outputs: Those without gradient are left out, together with their gradients.
        output_grads: One for each output. None stands for 1 at an output with one element (a loss), and for no gradient
            at a larger one. None for all means that each is None.
        inputs: Leaf tensors, or None. Their `.grad` is None afterwards.

    Raises:
        ValueError: If an input is not a leaf, or there are not as many gradients as outputs.
    """
    _check_inputs(inputs)
    roots, grads = _pair_outputs(outputs, output_grads)
    if roots:
        # Not `torch.autograd.backward`, whose checks in Python take as long as a small layer. The engine checks shapes too.
        _engine_run_backward(tuple(roots), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)
    input_grads = [None if tensor is None else tensor.grad for tensor in inputs]
    for tensor in inputs:
        if tensor is not None:
            tensor.grad = None
    return input_grads


def stage_backward_input(
    outputs: Sequence[StageOutput | None],
    output_grads: Sequence[torch.Tensor | None] | None,
    inputs: Sequence[torch.Tensor | None],
    weights: Iterable[torch.Tensor],
) -> BackwardInputResult:
    """Compute the gradients of the inputs, and keep what the gradients of the weights need. See [Note: Split backward pass].

    Frees the saved activations except those that the weight half needs. A stage none of whose inputs wants a gradient
    does nothing here, and all in the weight half.

    Args:
        outputs: As in `stage_backward_full`.
        output_grads: As in `stage_backward_full`.
        inputs: Leaf tensors, or None. Their `.grad` is left alone.
        weights: The parameters of the stage. Not read: the graph leads to those that take part.

    Raises:
        ValueError: If an input is not a leaf, or there are not as many gradients as outputs.
        RuntimeError: From torch, if reentrant activation checkpoints are on the path to the inputs.
    """
    _check_inputs(inputs)
    tensors, grads = _pair_outputs(outputs, output_grads)
    roots = [tensor if isinstance(tensor, GradientEdge) else get_gradient_edge(tensor) for tensor in tensors]
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    path = _find_path(roots, [get_gradient_edge(tensor).node for tensor in wanted])
    # An output that depends on no input, such as a penalty on weights, is left to the weight half altogether.
    work: list[WeightWork] = [
        KnownGradient((root,), (grad,)) for root, grad in zip(roots, grads, strict=True) if root.node not in path
    ]
    input_grads: Iterator[torch.Tensor | None] = itertools.repeat(None)
    if path:
        on_path = [(root, grad) for root, grad in zip(roots, grads, strict=True) if root.node in path]
        recorders = _register_hooks(path)
        try:
            input_grads = iter(_run_input_half(on_path, wanted, recorders))
        finally:
            for recorder in recorders:
                work += recorder.take_work()
    all_input_grads = [next(input_grads) if tensor is not None and tensor.requires_grad else None for tensor in inputs]
    _separate_memory(work, [*grads, *all_input_grads])
    return BackwardInputResult(input_grads=all_input_grads, param_groups=WeightGradients(work))


def stage_backward_weight(weights: Iterable[torch.Tensor], param_groups: WeightGradients) -> None:
    """Accumulate the gradients of the weights, with the same hooks as in a full pass, and free what was kept for them.

    Args:
        weights: The parameters of the stage. Not read: the graph leads to those that take part.
        param_groups: From the `stage_backward_input` of the same microbatch.

    Raises:
        RuntimeError: If it was called before with the same `param_groups`, or what they keep was modified in place.
    """
    param_groups.accumulate()


def _separate_memory(work: Sequence[WeightWork], elsewhere: Sequence[torch.Tensor | None]) -> None:
    """Copy gradients of weights that share memory with gradients which the caller passes on.

    A parameter without a gradient takes over what it is given, and the next microbatch adds to that in place. What has
    another shape than the parameter is reduced to it first, into new memory.
    """
    used = {_memory_of(gradient) for gradient in elsewhere if gradient is not None}
    for piece in work:
        if isinstance(piece, KnownGradient):
            piece.grads = tuple(
                grad.clone() if _memory_of(grad) in used and _has_shape_of(edge, grad) else grad
                for edge, grad in zip(piece.edges, piece.grads, strict=True)
            )


def _memory_of(tensor: torch.Tensor) -> int:
    return local_tensor(tensor).untyped_storage().data_ptr()


def _has_shape_of(edge: GradientEdge, grad: torch.Tensor) -> bool:
    # Not documented; checked with torch 2.11, 2.13 and 2.14.
    metadata: Any = edge.node._input_metadata  # pyright: ignore[reportPrivateUsage]
    return tuple(metadata[edge.output_nr].shape) == tuple(grad.shape)


def _check_inputs(inputs: Sequence[torch.Tensor | None]) -> None:
    for index, tensor in enumerate(inputs):
        if tensor is not None and not tensor.is_leaf:
            raise ValueError(
                f"Stage input {index} ({list(tensor.shape)}) is not a leaf: it was computed by {tensor.grad_fn}. Give "
                "the stage tensor.detach().requires_grad_() instead."
            )


def _pair_outputs(
    outputs: Sequence[StageOutput | None], output_grads: Sequence[torch.Tensor | None] | None
) -> tuple[list[StageOutput], list[torch.Tensor]]:
    if output_grads is None:
        output_grads = [None] * len(outputs)
    if len(outputs) != len(output_grads):
        raise ValueError(
            f"There are {len(outputs)} outputs but {len(output_grads)} gradients. Give one for each output."
        )
    roots: list[StageOutput] = []
    grads: list[torch.Tensor] = []
    for output, grad in zip(outputs, output_grads, strict=True):
        if output is None or (isinstance(output, torch.Tensor) and not output.requires_grad):
            continue
        grad = grad if grad is not None else _implicit_grad(output)
        if grad is not None:
            roots.append(output)
            grads.append(grad)
    return roots, grads


def _implicit_grad(output: StageOutput) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return torch.ones_like(output) if output.numel() == 1 else None
    node: Any = output.node  # what torch.autograd.backward reads for an edge; checked with torch 2.11, 2.13 and 2.14
    metadata = node._input_metadata[output.output_nr]
    shape = torch.Size(metadata.shape)
    return torch.ones(shape, dtype=metadata.dtype, device=metadata.device) if shape.numel() == 1 else None


_Path = dict[Node, tuple[tuple[Node | None, int], ...]]


def _find_path(roots: Sequence[GradientEdge], input_nodes: Sequence[Node]) -> _Path:
    """Return the nodes from which an input can be reached, with their next edges, in order of discovery."""
    ends = set(input_nodes)
    if not ends:
        return {}
    next_edges: _Path = {}
    parents: dict[Node, list[Node]] = {root.node: [] for root in roots}
    stack = list(parents)
    while stack:
        node = stack.pop()
        next_edges[node] = edges = node.next_functions
        for child, _ in edges:
            if child in parents:
                parents[child].append(node)
            elif child is not None and (type(child) is not ACCUMULATE_GRAD or child in ends):
                parents[child] = [node]
                stack.append(child)
    on_path: set[Node] = set()
    stack = [node for node in ends if node in parents]
    while stack:
        node = stack.pop()
        if node not in on_path:
            on_path.add(node)
            stack += parents[node]
    if len(on_path) == len(next_edges):
        return next_edges
    return {node: edges for node, edges in next_edges.items() if node in on_path}


class _EdgeRecorder:
    """Hook that runs after a node and keeps the gradients which leave the path.

    It refers to no node on the path: hooks belong to nodes, and such a cycle would never be freed.
    """

    __slots__ = ("_leaving", "_work", "edges")

    def __init__(self, leaving: dict[int, GradientEdge]) -> None:
        self.edges = tuple(leaving.values())
        self._leaving = leaving
        self._work: list[WeightWork] = []

    def receive(self, grad_inputs: _Grads, grad_outputs: _Grads) -> None:
        self._work += _known(self._leaving, grad_inputs)

    def take_work(self) -> list[WeightWork]:
        work, self._work = self._work, []
        return work


def _known(leaving: dict[int, GradientEdge], grads: _Grads) -> list[KnownGradient]:
    return [KnownGradient((edge,), (grad,)) for index, edge in leaving.items() if (grad := grads[index]) is not None]


class _FunctionRecorder:
    """Hooks around a Python function that leaves the path, which lets it withhold the gradients of weights."""

    def __init__(self, node: BackwardCFunction, leaving: dict[int, GradientEdge], on_path: list[int]) -> None:
        self.edges = tuple(leaving.values())
        self._leaving = leaving
        self._on_path = on_path
        self._node: BackwardCFunction | None = node
        self._restore: contextlib.ExitStack | None = None
        self._work: list[WeightWork] = []

    def enter(self, grad_outputs: _Grads) -> None:
        """Narrow the direction, unless a gradient is missing: autograd may fill it in, and a replay would not."""
        if all(grad is not None for grad in grad_outputs):
            self._restore = contextlib.ExitStack()
            self._restore.enter_context(GLOBAL_GRAD_CONTEXT.with_directions(GradDirection.inputs))

    def receive(self, grad_inputs: _Grads, grad_outputs: _Grads) -> None:
        """Keep what leaves the path, and prepare a replay for what the function has withheld."""
        self._work += _known(self._leaving, grad_inputs)
        node, self._node = self._node, None
        if self._restore is None or node is None:
            return
        self._restore.close()
        complete = tuple(grad for grad in grad_outputs if grad is not None)
        if any(grad_inputs[index] is None for index in self._on_path):
            self._check_nothing_is_missing(node, grad_inputs, complete)
        withheld = [index for index in self._leaving if grad_inputs[index] is None]
        if withheld:
            edges = tuple(self._leaving[index] for index in withheld)
            self._work.append(FunctionReplay(SavedContext(node), complete, edges, tuple(withheld)))

    def _check_nothing_is_missing(
        self, node: BackwardCFunction, grad_inputs: _Grads, grad_outputs: tuple[torch.Tensor, ...]
    ) -> None:
        late = SavedContext(node).backward_weight(grad_outputs)
        for index in self._on_path:
            if grad_inputs[index] is None and late.get(index) is not None:
                raise NotImplementedError(
                    f"{type(node).__name__.removesuffix('Backward')} withholds the gradient of its tensor argument {index} in "
                    f"the input half of a backward pass (GradDirection.inputs), though that depends on an input of "
                    "the stage. Let it ask GLOBAL_GRAD_CONTEXT only about arguments that are parameters."
                )

    def take_work(self) -> list[WeightWork]:
        """Give away what was kept, and forget the node, also if it did not run: hooks belong to it."""
        self._node = None
        work, self._work = self._work, []
        return work


_Recorder = DeferredGemm | _EdgeRecorder | _FunctionRecorder


def _register_hooks(path: _Path) -> list[_Recorder]:
    """Have each node from which edges leave the path record what the weight half needs."""
    recorders: list[_Recorder] = []
    for node, next_edges in path.items():
        if len(next_edges) < 2:
            continue  # the only edge stays on the path, as the node would not be there otherwise
        leaving = [index for index, (child, _) in enumerate(next_edges) if child is not None and child not in path]
        if not leaving:
            continue
        gemm = plan_gemm(node, next_edges, path) if type(node) in GEMM_RULES else None
        if gemm is not None:
            node.register_prehook(gemm.receive)
            recorders.append(gemm)
        else:
            recorders.append(_record_edges(node, next_edges, leaving))
    return recorders


def _record_edges(node: Node, next_edges: Sequence[Any], positions: Sequence[int]) -> _Recorder:
    leaving = {position: GradientEdge(*next_edges[position]) for position in positions}
    if isinstance(node, BackwardCFunction) and _may_withhold(node):
        on_path = [index for index, (child, _) in enumerate(next_edges) if child is not None and index not in leaving]
        function = _FunctionRecorder(node, leaving, on_path)
        node.register_prehook(function.enter)
        node.register_hook(function.receive)
        return function
    recorder = _EdgeRecorder(leaving)
    node.register_hook(recorder.receive)
    return recorder


def _may_withhold(function: BackwardCFunction) -> bool:
    """Tell whether a function may be asked twice: not torch's own, nor if it had to be recomputed or loaded twice."""
    node: Any = function  # its attributes are not documented; checked with torch 2.11, 2.13 and 2.14
    is_of_torch = node._forward_cls.__module__.partition(".")[0] == "torch"
    return not is_of_torch and all(raw.unpack_hook is None for raw in node._raw_saved_tensors)


def _run_input_half(
    roots: Sequence[tuple[GradientEdge, torch.Tensor]], wanted: Sequence[torch.Tensor], recorders: Sequence[_Recorder]
) -> tuple[torch.Tensor | None, ...]:
    # What is recorded has to be asked for, or the engine would not compute it. What it returns for that is not used.
    asked = {
        (edge.node, edge.output_nr): edge
        for recorder in recorders
        if not isinstance(recorder, DeferredGemm)
        for edge in recorder.edges
    }
    mixed: Any = [*wanted, *asked.values()]  # the stubs of torch want tensors only, or edges only
    both = GLOBAL_GRAD_CONTEXT.with_directions(*GradDirection)  # restored also if a function raises between its hooks
    with _tensor_hooks_disabled(edge.node for edge in asked.values()), both:
        grads = torch.autograd.grad(
            [edge for edge, _ in roots],
            mixed,
            [grad for _, grad in roots],
            # Also what leads to something that is asked for runs. Mostly that is on the path. What is not runs once more
            # in the weight half, and for this has to keep what it saved; the path then keeps it too, until it is freed.
            retain_graph=_lead_off_path_to({node for node, _ in asked}, recorders),
            allow_unused=True,
        )
    return grads[: len(wanted)]


def _lead_off_path_to(targets: set[Node], recorders: Sequence[_Recorder]) -> bool:
    """Tell whether a node off the path leads to one of the targets, as when a parameter leaves it in two ways."""
    if not targets:
        return False
    seen: set[Node] = set()
    stack = [edge.node for recorder in recorders for edge in recorder.edges]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            children = [child for child, _ in node.next_functions if child is not None]
            if not targets.isdisjoint(children):
                return True
            stack += children
    return False


@contextlib.contextmanager
def _tensor_hooks_disabled(nodes: Iterable[Node]) -> Generator[None]:
    """Take away the hooks of parameters that the input half asks for: they fire in the weight half, once."""
    leaves = [leaf_of(node) for node in nodes if type(node) is ACCUMULATE_GRAD]
    hooks = [(leaf, leaf._backward_hooks) for leaf in leaves if leaf._backward_hooks]
    try:
        for leaf, _ in hooks:
            leaf._backward_hooks = None
        yield
    finally:
        for leaf, registered in hooks:
            leaf._backward_hooks = registered
