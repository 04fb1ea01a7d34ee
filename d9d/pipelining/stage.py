"""One stage of a pipeline on its rank: what it holds of each microbatch between the actions of a program."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from d9d.core.placement import local_tensor
from d9d.core.pytree import PyTreeSpec, tree_unflatten
from d9d.core.types import PyTree, TensorSpec
from d9d.pipelining.api import (
    ModuleSupportsPipelining,
    PipelineStageInfo,
    StageBoundary,
    TPipelineInput,
    TPipelineOutput,
    TSharedInput,
    TStageTransfer,
)
from d9d.pipelining.backward import stage_backward_full, stage_backward_input, stage_backward_weight
from d9d.pipelining.p2p import BufferPool, Transfer, Transport, is_unshared
from d9d.pipelining.transfer import BoundaryKind, BoundarySpec, flatten_output

__all__ = ["PipelineStage"]

Root: TypeAlias = torch.Tensor | GradientEdge | None
"""Where a backward pass starts. None for an output that has turned out to need no gradient."""


# `Any` in this module: what stages pass on are the job's own types.
@dataclasses.dataclass(slots=True)
class _Input:
    """The input of a stage for a microbatch."""

    value: Any
    differentiable: list[torch.Tensor]
    """Leaves whose gradients go to the stage before."""
    buffers: list[torch.Tensor]
    """Memory to give back once the graph is gone."""


@dataclasses.dataclass(slots=True)
class _Agreement:
    """Which leaves of a boundary have gradients, as the sender has found with the first microbatch of this kind."""

    message: torch.Tensor
    transfer: Transfer
    flags: list[bool] | None = None

    def resolve(self) -> list[bool]:
        """Return whether each tensor of the boundary has a gradient; waits for the message the first time."""
        if self.flags is None:
            self.transfer.wait()
            self.flags = [bool(flag) for flag in self.message.tolist()]
        return self.flags


@dataclasses.dataclass(slots=True)
class _Receiving:
    """An input on its way."""

    spec: BoundarySpec
    buffers: list[torch.Tensor]
    transfer: Transfer
    agreement: _Agreement


@dataclasses.dataclass(slots=True)
class _ReceivingGradients:
    """Gradients of an output on their way."""

    buffers: list[torch.Tensor]
    transfer: Transfer


@dataclasses.dataclass(slots=True)
class _Pass:
    """A microbatch between its forward pass and the end of its backward pass in a stage."""

    inputs: list[torch.Tensor]
    buffers: list[torch.Tensor]
    roots: list[Root]
    gradients: list[tuple[tuple[int, ...], torch.dtype]]
    """Shape and type of the gradients that come back, one per root."""
    deferred: Any = None
    """What the first half of a split backward pass has left to the second one."""


class PipelineStage(Generic[TPipelineInput, TStageTransfer, TSharedInput, TPipelineOutput]):
    """Runs forward and backward passes of single microbatches through one stage.

    [Note: what a stage holds]
    From a forward pass to the end of the backward pass: the inputs, and the graph by its roots. Not the output, which a
    send keeps as long as it lasts: the graph can be entered without the tensor that it made. After the first half of a
    split backward pass only what the weight gradients need is left. So the number of live activations follows the
    program, and never the number of microbatches of the pack.

    [Note: gradients over a boundary]
    Only the sender knows which of its outputs require a gradient: masks and position tables often do not. It says so
    once for each structure and types of a transfer, in a short message ahead of the first one. From then on the
    receiver asks for gradients of these leaves and sends none for the others.
    """

    def __init__(
        self,
        info: PipelineStageInfo,
        module: nn.Module,
        group: dist.ProcessGroup,
        stage_to_host_topology: Mapping[int, int],
    ) -> None:
        """Describe a stage.

        Args:
            info: Which stage of the pipeline it is.
            module: A `ModuleSupportsPipelining`.
            group: The ranks of the pipeline.
            stage_to_host_topology: Rank in the group of each stage.
        """
        self._info = info
        self._is_first = info.is_current_stage_first
        self.is_last: Final = info.is_current_stage_last
        """Whether `forward` returns the pipeline output."""
        self._module = module
        self._pipelined = cast("ModuleSupportsPipelining[Any, Any, Any, Any]", module)
        self._group = group
        self._previous_host = stage_to_host_topology.get(info.current_stage - 1, -1)
        self._next_host = stage_to_host_topology.get(info.current_stage + 1, -1)
        self._previous: PipelineStage[Any, Any, Any, Any] | None = None
        self._next: PipelineStage[Any, Any, Any, Any] | None = None
        self._transport: Transport
        self._pool: BufferPool
        self._device = torch.device("cpu")
        self._has_backward = False
        self._buffer_memory: set[int] = set()
        self._inbox: dict[int, _Input | _Receiving] = {}
        self._outbox: dict[int, list[torch.Tensor]] = {}
        self._passes: dict[int, _Pass] = {}
        self._gradient_inbox: dict[int, list[torch.Tensor | None] | _ReceivingGradients] = {}
        self._gradient_outbox: dict[int, list[torch.Tensor]] = {}
        self._agreed_incoming: dict[BoundaryKind, _Agreement] = {}
        self._agreed_outgoing: dict[BoundaryKind, list[bool]] = {}
        self._last_spec: BoundarySpec | None = None

    @property
    def info(self) -> PipelineStageInfo:
        """Which stage of the pipeline it is."""
        return self._info

    @property
    def module(self) -> nn.Module:
        """The module of the stage."""
        return self._module

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of the pipeline."""
        return self._group

    def connect(
        self,
        stages: "Mapping[int, PipelineStage[Any, Any, Any, Any]]",
        transport: Transport,
        pool: BufferPool,
        device: torch.device,
    ) -> None:
        """Join the stage with its neighbours, before the first pack.

        Args:
            stages: All stages of this rank by their index, this one among them.
            transport: Reaches the other ranks.
            pool: Holds the buffers of this rank's stages.
            device: Device of this rank.
        """
        self._previous = stages.get(self._info.current_stage - 1)
        self._next = stages.get(self._info.current_stage + 1)
        self._transport, self._pool, self._device = transport, pool, device

    def describe_transfers(self, pipeline_inputs: Sequence[TPipelineInput]) -> dict[StageBoundary, list[str]]:
        """Write what the boundaries to other ranks exchange for each microbatch of a pack.

        Both sides of a boundary must write the same.
        """
        is_remote = {
            StageBoundary.incoming: not self._is_first and self._previous is None,
            StageBoundary.outgoing: not self.is_last and self._next is None,
        }
        return {
            boundary: [self._spec(each, boundary).describe() for each in pipeline_inputs]
            for boundary, remote in is_remote.items()
            if remote
        }

    def start_pack(self, *, has_backward: bool) -> None:
        """Forget what an interrupted pack has left behind."""
        self._has_backward = has_backward
        if not has_backward:
            self._buffer_memory = {
                local_tensor(buffer).untyped_storage().data_ptr() for buffer in self._module.buffers()
            }
        for kept in (self._inbox, self._outbox, self._passes, self._gradient_inbox, self._gradient_outbox):
            kept.clear()

    # Forward

    def forward(self, microbatch: int, pipeline_input: TPipelineInput, shared: TSharedInput) -> TPipelineOutput | None:
        """Run a microbatch through the stage.

        Returns:
            The pipeline output on the last stage; on the others the output goes to the next stage.
        """
        given = _Input(pipeline_input, [], []) if self._is_first else self._take_input(microbatch)
        output = self._module(given.value, shared)
        current = _Pass(given.differentiable, given.buffers, [], [])
        if self._has_backward:
            self._passes[microbatch] = current
        if self.is_last:
            result = cast("TPipelineOutput", output)
        else:
            result = None
            self._keep_output(microbatch, output, pipeline_input, current)
        if not self._has_backward:
            self._pool.give_back(given.buffers)
        return result

    def _keep_output(self, microbatch: int, output: PyTree[Any], pipeline_input: object, current: _Pass) -> None:
        leaves, treespec = flatten_output(output)
        leaves = [leaf.clone() if self._may_be_kept(leaf) else leaf for leaf in leaves]
        if self._next is not None:
            if self._has_backward:
                flags = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
                self._add_roots(current, leaves, flags)
            self._next.accept_input(microbatch, leaves, treespec)
            return
        spec = self._spec(pipeline_input, StageBoundary.outgoing)
        tensors = spec.sendable_leaves(leaves, treespec)
        # Detached: a send that is under way must not keep the graph.
        to_send = [tensor.detach().contiguous() for tensor in tensors]
        flags = [self._has_backward and tensor.requires_grad for tensor in tensors]
        agreed = self._agreed_outgoing.get(spec.kind)
        if agreed is None:
            agreed = self._agreed_outgoing[spec.kind] = flags
            to_send.insert(0, torch.tensor(flags, dtype=torch.uint8, device=self._device))
        elif flags != agreed:
            _refuse_new_gradients(flags, agreed, spec)
        if self._has_backward:
            self._add_roots(current, tensors, agreed)
        self._outbox[microbatch] = to_send

    def _may_be_kept(self, leaf: object) -> bool:
        """Tell whether an output may be a tensor that the module keeps and changes in place for the next microbatch."""
        if not isinstance(leaf, torch.Tensor) or leaf.requires_grad:
            return False
        # Without a graph everywhere, look for buffers alone: hidden states are too large to copy them for nothing.
        return self._has_backward or local_tensor(leaf).untyped_storage().data_ptr() in self._buffer_memory

    @staticmethod
    def _add_roots(current: _Pass, leaves: list[Any], flags: list[bool]) -> None:
        for leaf, has_gradient in zip(leaves, flags, strict=True):
            if has_gradient:
                # See [Note: what a stage holds].
                current.roots.append(get_gradient_edge(leaf) if leaf.requires_grad else None)
                current.gradients.append((leaf.shape, leaf.dtype))

    def accept_input(self, microbatch: int, leaves: list[Any], treespec: PyTreeSpec | None) -> None:
        """Take the output of the stage before, which is on the same rank."""
        differentiable: list[torch.Tensor] = []
        for index, leaf in enumerate(leaves):
            if self._has_backward and isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaves[index] = leaf.detach().requires_grad_()
                differentiable.append(leaves[index])
        value = leaves[0] if treespec is None else tree_unflatten(treespec, leaves)
        self._inbox[microbatch] = _Input(value, differentiable, [])

    def send_forward(self, microbatch: int) -> None:
        """Start to send the output of a microbatch to the rank of the next stage."""
        self._transport.send(self._outbox.pop(microbatch), self._next_host, microbatch)

    def receive_forward(self, microbatch: int, pipeline_input: TPipelineInput) -> None:
        """Start to receive the input of a microbatch from the rank of the stage before."""
        spec = self._spec(pipeline_input, StageBoundary.incoming)
        tensors = spec.tensors
        agreement = self._agreed_incoming.get(spec.kind)
        if agreement is None:
            message = torch.empty(len(tensors), dtype=torch.uint8, device=self._device)
            agreement = _Agreement(message, self._transport.receive([message], self._previous_host, microbatch))
            self._agreed_incoming[spec.kind] = agreement
        buffers = [self._pool.take(tensor.shape, tensor.dtype) for tensor in tensors]
        self._inbox[microbatch] = _Receiving(
            spec, buffers, self._transport.receive(buffers, self._previous_host, microbatch), agreement
        )

    def wait_for_input(self, microbatch: int) -> None:
        """Wait here for the input of a microbatch, rather than in `forward`."""
        if not self._is_first:
            self._inbox[microbatch] = self._take_input(microbatch)

    def _take_input(self, microbatch: int) -> _Input:
        given = self._inbox.pop(microbatch)
        if isinstance(given, _Input):
            return given
        flags = given.agreement.resolve()
        given.transfer.wait()
        # Aliases: see BufferPool.
        tensors = [buffer.detach() for buffer in given.buffers]
        differentiable = [
            tensor.requires_grad_() for tensor, has_gradient in zip(tensors, flags, strict=True) if has_gradient
        ]
        return _Input(given.spec.unflatten(tensors), differentiable, given.buffers)

    def _spec(self, pipeline_input: object, boundary: StageBoundary) -> BoundarySpec:
        spec = self._pipelined.stage_transfer_spec(pipeline_input, boundary)
        # Most microbatches are like the one before.
        if self._last_spec is None or type(spec) is not TensorSpec or self._last_spec.source != spec:
            self._last_spec = BoundarySpec(spec)
        return self._last_spec

    # Backward

    def set_loss(self, microbatch: int, loss: torch.Tensor) -> None:
        """Take what the backward pass of a microbatch starts from, on the last stage."""
        self._passes[microbatch].roots.append(loss)

    def backward(self, microbatch: int) -> None:
        """Compute all gradients of a microbatch."""
        current = self._passes.pop(microbatch)
        roots, gradients, buffers = self._take_gradients(microbatch, current)
        input_gradients = stage_backward_full(roots, gradients, current.inputs)
        self._keep_input_gradients(microbatch, current, input_gradients)
        self._give_back(current, buffers)

    def backward_input(self, microbatch: int) -> None:
        """Compute the gradients of the stage's inputs for a microbatch, and leave those of the weights."""
        current = self._passes[microbatch]
        roots, gradients, buffers = self._take_gradients(microbatch, current)
        half = stage_backward_input(roots, gradients, current.inputs, self._module.parameters())
        self._keep_input_gradients(microbatch, current, half.input_grads)
        current.deferred = half.param_groups
        current.roots, current.inputs = [], []
        current.buffers = current.buffers + buffers

    def backward_weight(self, microbatch: int) -> None:
        """Compute the gradients of the weights that `backward_input` has left."""
        current = self._passes.pop(microbatch)
        deferred, current.deferred = current.deferred, None
        stage_backward_weight(self._module.parameters(), deferred)
        del deferred
        self._give_back(current, [])

    def _give_back(self, current: _Pass, buffers: list[torch.Tensor]) -> None:
        self._pool.give_back(current.buffers)
        self._pool.give_back(buffers)

    def wait_for_gradients(self, microbatch: int) -> None:
        """Wait here for the gradients of a microbatch's output, rather than in `backward` or `backward_input`."""
        received = self._gradient_inbox.get(microbatch)
        if isinstance(received, _ReceivingGradients):
            received.transfer.wait()

    def _take_gradients(
        self, microbatch: int, current: _Pass
    ) -> tuple[list[torch.Tensor | GradientEdge], list[torch.Tensor | None], list[torch.Tensor]]:
        """Return where the backward pass starts, from which gradients, and their buffers."""
        buffers: list[torch.Tensor] = []
        gradients: list[torch.Tensor | None]
        if self.is_last:
            gradients = [None]
        else:
            received = self._gradient_inbox.pop(microbatch)
            if isinstance(received, _ReceivingGradients):
                received.transfer.wait()
                buffers = received.buffers
                gradients = [buffer.detach() for buffer in buffers]
            else:
                gradients = received
        # A backward pass would take no gradient for 1 at a root of one element, which is right for a loss alone.
        pairs = [
            (root, gradient)
            for root, gradient in zip(current.roots, gradients, strict=True)
            if root is not None and (self.is_last or gradient is not None)
        ]
        return [root for root, _ in pairs], [gradient for _, gradient in pairs], buffers

    def _keep_input_gradients(self, microbatch: int, current: _Pass, gradients: Sequence[torch.Tensor | None]) -> None:
        if self._is_first:
            return
        # Autograd may give a parameter a view of the same memory as its gradient, and the next microbatch adds to that.
        gradients = [
            gradient if gradient is None or is_unshared(gradient) else gradient.clone() for gradient in gradients
        ]
        if self._previous is not None:
            self._previous.accept_gradients(microbatch, gradients)
            return
        # An input that the output does not depend on has no gradient, but the stage before waits for one.
        self._gradient_outbox[microbatch] = [
            torch.zeros_like(leaf) if gradient is None else gradient.contiguous()
            for leaf, gradient in zip(current.inputs, gradients, strict=True)
        ]

    def accept_gradients(self, microbatch: int, gradients: list[torch.Tensor | None]) -> None:
        """Take the gradients of the stage's output from the next stage, which is on the same rank."""
        self._gradient_inbox[microbatch] = gradients

    def send_backward(self, microbatch: int) -> None:
        """Start to send the gradients of a microbatch's input to the rank of the stage before."""
        self._transport.send(self._gradient_outbox.pop(microbatch), self._previous_host, microbatch)

    def receive_backward(self, microbatch: int) -> None:
        """Start to receive the gradients of a microbatch's output from the rank of the next stage."""
        buffers = [self._pool.take(shape, dtype) for shape, dtype in self._passes[microbatch].gradients]
        self._gradient_inbox[microbatch] = _ReceivingGradients(
            buffers, self._transport.receive(buffers, self._next_host, microbatch)
        )


def _refuse_new_gradients(flags: list[bool], agreed: list[bool], spec: BoundarySpec) -> None:
    if any(now and not before for now, before in zip(flags, agreed, strict=True)):
        raise RuntimeError(
            f"an output of the stage requires a gradient, but did not with the first microbatch of its kind, so that the "
            f"next stage sends none. Outputs: {spec.describe()}; requires_grad then: {agreed}, now: {flags}. Let the "
            f"same outputs require gradients for every microbatch."
        )
