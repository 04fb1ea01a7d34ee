"""What the input half of a split backward pass leaves for the weight half, and how the weight half runs it.

Attributes of autograd nodes that torch documents nowhere (``_saved_*``, ``_raw_saved_*``, ``variable``) and
``torch.autograd.graph._engine_run_backward`` were checked with torch 2.11, 2.13 and 2.14.
"""

import dataclasses
from collections.abc import Callable, Container, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward  # pyright: ignore[reportPrivateUsage]

from d9d.core.autograd import GLOBAL_GRAD_CONTEXT, GradDirection

# The node classes live in a module that is written in C++ and has no stubs.
_NODE_TYPES: Any = torch._C._functions  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
ACCUMULATE_GRAD: Final = _NODE_TYPES.AccumulateGrad
"""Type of the node in which a leaf tensor collects its gradient."""
_TRANSPOSE: Final = _NODE_TYPES.TBackward0

MAX_PENDING_BYTES: Final = 64 * 2**20
"""Weight gradients that may wait for one run of the engine: a run costs some microseconds, as much as a small GEMM, but
what waits for it is memory on top of the gradients that are kept."""


_Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _right_gradient(grad: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    return left.t().mm(grad)


def _right_gradient_transposed(grad: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    return grad.t().mm(left)


def _left_gradient(grad: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return grad.mm(right.t())


def _left_gradient_transposed(grad: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return right.mm(grad.t())


def _batched_right_gradient(grad: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    return left.transpose(1, 2).bmm(grad)


def _batched_left_gradient(grad: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return grad.bmm(right.transpose(1, 2))


_TRANSPOSED: Final = (_right_gradient_transposed, _left_gradient_transposed)


class _Operand(NamedTuple):
    """How to get the gradient of one operand of a matrix product. Nodes have no static types, hence `Any`."""

    raw_other: Callable[[Any], Any]
    saved_other: Callable[[Any], torch.Tensor]
    """The other operand, which the gradient is multiplied with."""
    layout: Callable[[Any], tuple[Sequence[int], Sequence[int]]] | None
    """Size and stride of this operand; None for a batch of matrices, where autograd does not ask for them."""
    product: _Product
    product_transposed: _Product
    """What autograd computes, and what it computes and then transposes if this operand is a transposed matrix."""


class GemmRule(NamedTuple):
    """What the node of a matrix product keeps."""

    has_addend: bool
    """Whether edge 0 is a term that is added to the product, and the product is scaled by alpha, the term by beta."""
    left: _Operand
    right: _Operand


GEMM_RULES: Final[dict[type, GemmRule]] = {
    _NODE_TYPES.MmBackward0: GemmRule(
        has_addend=False,
        left=_Operand(
            lambda node: node._raw_saved_mat2,
            lambda node: node._saved_mat2,
            lambda node: (node._saved_self_sym_sizes, node._saved_self_sym_strides),
            _left_gradient,
            _left_gradient_transposed,
        ),
        right=_Operand(
            lambda node: node._raw_saved_self,
            lambda node: node._saved_self,
            lambda node: (node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides),
            _right_gradient,
            _right_gradient_transposed,
        ),
    ),
    _NODE_TYPES.AddmmBackward0: GemmRule(
        has_addend=True,
        left=_Operand(
            lambda node: node._raw_saved_mat2,
            lambda node: node._saved_mat2,
            lambda node: (node._saved_mat1_sym_sizes, node._saved_mat1_sym_strides),
            _left_gradient,
            _left_gradient_transposed,
        ),
        right=_Operand(
            lambda node: node._raw_saved_mat1,
            lambda node: node._saved_mat1,
            lambda node: (node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides),
            _right_gradient,
            _right_gradient_transposed,
        ),
    ),
    _NODE_TYPES.BmmBackward0: GemmRule(
        has_addend=False,
        left=_Operand(
            lambda node: node._raw_saved_mat2,
            lambda node: node._saved_mat2,
            None,
            _batched_left_gradient,
            _batched_left_gradient,
        ),
        right=_Operand(
            lambda node: node._raw_saved_self,
            lambda node: node._saved_self,
            None,
            _batched_right_gradient,
            _batched_right_gradient,
        ),
    ),
    _NODE_TYPES.BaddbmmBackward0: GemmRule(
        has_addend=True,
        left=_Operand(
            lambda node: node._raw_saved_batch2,
            lambda node: node._saved_batch2,
            None,
            _batched_left_gradient,
            _batched_left_gradient,
        ),
        right=_Operand(
            lambda node: node._raw_saved_batch1,
            lambda node: node._saved_batch1,
            None,
            _batched_right_gradient,
            _batched_right_gradient,
        ),
    ),
}
"""The nodes whose weight gradient is deferred."""


def _version(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # inference tensors count no versions, and are cheaper to meet than to ask about
        return 0


class WeightWork(Protocol):
    """A piece of the weight half."""

    edges: tuple[GradientEdge, ...]
    """Where its gradients enter the part of the graph that leads to parameters only."""
    num_bytes: int
    """Size of the gradients that it will produce."""

    def run(self, edges: list[GradientEdge], grads: list[torch.Tensor]) -> None:
        """Append gradients, and the edges at which they enter the graph."""
        ...


@dataclasses.dataclass(slots=True)
class KnownGradient:
    """A gradient that the input half has computed, because it is cheap or comes along with others."""

    edges: tuple[GradientEdge, ...]
    grads: tuple[torch.Tensor, ...]
    num_bytes: int = 0

    def run(self, edges: list[GradientEdge], grads: list[torch.Tensor]) -> None:
        """Pass on what is known."""
        edges += self.edges
        grads += self.grads


class DeferredGemm:
    """The product of a saved activation and a gradient, which comes when the node runs in the input half.

    It is a plain class with few attributes, as there is one for each linear layer and microbatch.
    """

    __slots__ = ("_grad", "_grad_version", "_operand", "_operand_version", "_product", "edges", "num_bytes")

    def __init__(self, operand: torch.Tensor, product: _Product, edges: tuple[GradientEdge, ...]) -> None:
        self._operand: torch.Tensor | None = operand
        self._operand_version = _version(operand)
        self._product = product
        self.edges = edges
        self._grad: torch.Tensor | None = None

    def receive(self, grad_outputs: Sequence[torch.Tensor | None]) -> None:
        """Keep the gradient of the product; a hook that runs before its node."""
        self._grad = grad_outputs[0]

    def take_work(self) -> "list[DeferredGemm]":
        """Note the state of what was kept; nothing to do if no gradient has arrived."""
        grad, operand = self._grad, self._operand
        if grad is None or operand is None:
            self._operand = None
            return []
        self._grad_version = _version(grad)
        self.num_bytes = grad.size(-1) * operand.size(-1) * grad.element_size()
        return [self]

    def run(self, edges: list[GradientEdge], grads: list[torch.Tensor]) -> None:
        """Multiply, and let go of the tensors: the hook of the node, and with it the graph, still refers to this."""
        grad, operand = self._grad, self._operand
        self._grad = self._operand = None
        if grad is None or operand is None:
            return
        if _version(operand) != self._operand_version or _version(grad) != self._grad_version:
            raise RuntimeError(
                f"An activation {list(operand.shape)} or a gradient {list(grad.shape)} that the weight half of a "
                "backward pass needs was modified in place after the input half. Keep the tensors that a stage "
                "receives unchanged until its stage_backward_weight, or receive into fresh ones."
            )
        product, edge = self._product(grad, operand), self.edges[0]
        if self._product in _TRANSPOSED:
            leaf = _find_leaf_that_adds(edge.node)
            if leaf is None:
                product = product.t()
            else:
                edge = leaf
        edges.append(edge)
        grads.append(product)
        if len(self.edges) > 1:  # the engine sums it over the rows, as in a full pass: to the shape that the edge takes
            edges.append(self.edges[1])
            grads.append(grad)


def _find_leaf_that_adds(node: Node) -> GradientEdge | None:
    """Return the edge of a parameter that is only transposed on the way, if it has a gradient to be added to.

    The transposition would only cost time then. An empty ``.grad`` however takes over a gradient to which nobody else
    refers, such as the result of a transposition within the engine, while it would copy ours.
    """
    if type(node) is _TRANSPOSE:
        child, output_nr = node.next_functions[0]
        if child is not None and type(child) is ACCUMULATE_GRAD and leaf_of(child).grad is not None:
            return GradientEdge(child, output_nr)
    return None


@dataclasses.dataclass(slots=True)
class FunctionReplay:
    """The weight half of an autograd function that asks `GLOBAL_GRAD_CONTEXT` what is wanted."""

    context: "SavedContext"
    grad_outputs: tuple[torch.Tensor, ...]
    edges: tuple[GradientEdge, ...]
    positions: tuple[int, ...]
    """For each of `edges`, its index among the next edges of the node."""
    num_bytes: int = 0

    def run(self, edges: list[GradientEdge], grads: list[torch.Tensor]) -> None:
        """Call the function again."""
        computed = self.context.backward_weight(self.grad_outputs)
        for edge, position in zip(self.edges, self.positions, strict=True):
            grad = computed.get(position)
            if grad is not None:
                edges.append(edge)
                grads.append(grad)


class SavedContext:
    """The context object of an autograd function whose saved tensors outlive the pass that released them."""

    def __init__(self, node: BackwardCFunction) -> None:
        self._node = node
        self.saved_tensors = node.saved_tensors

    def __getattr__(self, name: str) -> object:
        return getattr(self._node, name)  # introspection: stands for an object to which a function adds at will

    def backward_weight(self, grad_outputs: tuple[torch.Tensor, ...]) -> dict[int, torch.Tensor | None]:
        """Call the function for its weight half, and return gradients by index of the next edge of its node."""
        node: Any = self._node
        with torch.no_grad(), GLOBAL_GRAD_CONTEXT.with_directions(GradDirection.weight):
            # The unbound method picks `backward` or `vjp` of the user's class, and asks of `self` no more than we have.
            result = BackwardCFunction.apply(self, *grad_outputs)  # type: ignore[arg-type]
        results = result if isinstance(result, tuple) else (result,)
        # Next edges belong to tensor arguments only, results to all. Those that require a gradient are in both.
        wanted = [index for index, is_needed in enumerate(node.needs_input_grad) if is_needed]
        positions = [index for index, (child, _) in enumerate(node.next_functions) if child is not None]
        return {
            position: results[index] if index < len(results) else None
            for position, index in zip(positions, wanted, strict=True)
        }


class WeightGradients:
    """The weight half of one backward pass, to be run once."""

    def __init__(self, work: list[WeightWork]) -> None:
        self._work: list[WeightWork] | None = work

    def accumulate(self) -> None:
        """Add to the `.grad` of the parameters; each accumulates, and fires its hooks, once.

        Raises:
            RuntimeError: If it was called before, or a tensor that it needs was modified in place since.
        """
        if self._work is None:
            raise RuntimeError("stage_backward_weight was called twice for one stage_backward_input. Call it once.")
        work, self._work = self._work, None
        groups = [work]
        if sum(piece.num_bytes for piece in work) > MAX_PENDING_BYTES:
            groups = _batch(_group_by_parameters(work))
            work.clear()
        groups.reverse()
        with GLOBAL_GRAD_CONTEXT.with_directions(*GradDirection):
            while groups:
                _run_together(groups.pop())


def _batch(groups: list[list[WeightWork]]) -> list[list[WeightWork]]:
    """Join groups as long as they do not exceed the limit together."""
    batches: list[list[WeightWork]] = []
    room_bytes = 0
    for group in groups:
        num_bytes = sum(piece.num_bytes for piece in group)
        if batches and num_bytes <= room_bytes:
            batches[-1] += group
        else:
            batches.append(group)
            room_bytes = MAX_PENDING_BYTES
        room_bytes -= num_bytes
    return batches


def _run_together(work: list[WeightWork]) -> None:
    edges: list[GradientEdge] = []
    grads: list[torch.Tensor] = []
    work.reverse()
    with torch.no_grad():
        while work:
            work.pop().run(edges, grads)  # and is freed
    if edges:
        # Not `torch.autograd.backward`: that checks each gradient in Python, for as long as a small GEMM takes, and
        # refuses those which the engine sums to the shape of a bias.
        _engine_run_backward(tuple(edges), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _group_by_parameters(work: Sequence[WeightWork]) -> list[list[WeightWork]]:
    """Put together what leads to the same nodes: a run of the engine frees them, and parameters accumulate once."""
    owners: dict[Node, int] = {}  # the first piece that led to a node
    leaders: list[int] = []  # for each piece an earlier one of its group, or itself

    def find(index: int) -> int:
        while leaders[index] != index:
            index = leaders[index]
        return index

    for index, piece in enumerate(work):
        leaders.append(index)
        stack = [edge.node for edge in piece.edges]
        while stack:
            node = stack.pop()
            if node not in owners:
                owners[node] = index
                stack += [child for child, _ in node.next_functions if child is not None]
            else:
                first, second = sorted((find(owners[node]), find(index)))
                leaders[second] = first
    groups: dict[int, list[WeightWork]] = {}
    for index, piece in enumerate(work):
        groups.setdefault(find(index), []).append(piece)
    return list(groups.values())


def leaf_of(accumulate_grad: Node) -> torch.Tensor:
    """Return the tensor in which a node of type `ACCUMULATE_GRAD` collects a gradient."""
    node: Any = accumulate_grad
    return node.variable


def plan_gemm(gemm: Node, next_edges: Sequence[Any], on_path: Container[Node]) -> DeferredGemm | None:
    """Take from a node, before it runs, what its weight gradient needs; None if it has to be left to autograd."""
    node: Any = gemm
    rule = GEMM_RULES[type(node)]
    left, right = next_edges[-2], next_edges[-1]
    is_left_on_path, is_right_on_path = left[0] in on_path, right[0] in on_path
    if is_left_on_path == is_right_on_path:
        return None  # no weight, or a product of weights only, to which a term from the path is added
    weight, operand = (right, rule.right) if is_left_on_path else (left, rule.left)
    if weight[0] is None:
        return None
    if rule.has_addend and not (node._saved_alpha == 1 and node._saved_beta == 1):
        return None
    if operand.raw_other(node).unpack_hook is not None:
        return None  # checkpointed or offloaded: to unpack it here would recompute it, or load it, once more
    other = operand.saved_other(node)
    if other.layout is not torch.strided or other.is_complex():
        return None
    edges: tuple[GradientEdge, ...] = (GradientEdge(*weight),)
    if rule.has_addend and (addend := next_edges[0])[0] is not None and addend[0] not in on_path:
        edges = (*edges, GradientEdge(*addend))
    is_transposed = type(weight[0]) is _TRANSPOSE or _is_column_major(operand, node)
    # Detached, as the saved tensor would keep the graph above it.
    return DeferredGemm(other.detach(), operand.product_transposed if is_transposed else operand.product, edges)


def _is_column_major(operand: _Operand, node: Node) -> bool:
    """Ask what autograd asks, so that the product is the same bit for bit."""
    if operand.layout is None:
        return False
    sizes, strides = operand.layout(node)
    return strides[0] == 1 and strides[1] == sizes[0]
