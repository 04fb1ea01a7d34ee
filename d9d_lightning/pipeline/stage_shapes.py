"""What crosses the boundaries between stages, found by running the layers without data.

See [Note: layers without data] of `dataless`.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from d9d.core.pytree import tree_flatten, tree_map_only
from d9d.core.types import PyTree, TensorSpec
from d9d_lightning.pipeline.call import CapturedCall
from d9d_lightning.pipeline.dataless import (
    copy_layers,
    device_of,
    fake_call,
    new_fake_mode,
    skip_sample_counts,
    without_traces,
)
from d9d_lightning.pipeline.forward_check import ForwardCheck
from d9d_lightning.pipeline.stage_calls import LayerCalls, LayerRoute, PipelinedCall
from d9d_lightning.pipeline.stage_cut import Ranges, works_in_place

__all__ = ["ContextFactory", "StageShapes", "TransferSpec"]

ContextFactory: TypeAlias = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes what stages run in, such as autocast."""

# The arguments are those of the user's own call.
TransferSpec: TypeAlias = Callable[..., PyTree[TensorSpec]]
"""Says by hand what crosses a boundary: (index of the stage before it, *arguments of the pipelined call)."""

_MAX_KNOWN_FORMS = 4096
"""Forms of calls that are kept. More than all lengths of a text; a bound, as a call may hold a new object each time."""

_PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


# `Any` in this module: the user's own arguments and activations.
class StageShapes:
    """Knows the tensors between the stages of a module, on every rank. See [Note: layers without data]."""

    def __init__(
        self,
        pipelined: nn.Module,
        layer_names: Sequence[str],
        ranges: Ranges,
        calls: LayerCalls,
        *,
        run_in: ContextFactory = contextlib.nullcontext,
        transfer_spec: TransferSpec | None = None,
        forward_check: ForwardCheck | None = None,
    ) -> None:
        """Copy the layers without their data; nothing of the module is kept.

        Args:
            pipelined: The whole module, as it will run (precision plugins have converted it), but not distributed yet. It
                may be on the meta device.
            layer_names: Its layers in calling order.
            ranges: Layers of each stage.
            calls: What the layers are called with.
            run_in: What stages run in.
            transfer_spec: Asked instead, if given; no layer is copied then.
            forward_check: Holds the module's own forward pass against its layers, before anything else is done for a call.
        """
        self._names = tuple(layer_names)
        self._ranges = ranges
        self._calls = calls
        self._run_in = run_in
        self._transfer_spec = transfer_spec
        self._forward_check = forward_check
        self._mode = new_fake_mode()
        self._live: Sequence[nn.Module] = ()
        self._by_device: dict[torch.device, list[nn.Module]] = {}
        self._known: dict[object, tuple[PyTree[TensorSpec], ...]] = {}
        # The last stage sends nothing on.
        num_sending = ranges[-1][0] if transfer_spec is None else 0
        layers = [pipelined.get_submodule(name) for name in layer_names[:num_sending]]
        self._on_meta = copy_layers(layers, torch.device("meta"), self._mode)

    def follow(self, live: Sequence[nn.Module]) -> None:
        """Let the copies be in training mode whenever these modules are.

        Args:
            live: What is in the places of the layers on this rank, layers or placeholders, in the order of the names.
        """
        self._live = tuple(live[: len(self._on_meta)])

    def spec(self, boundary_index: int, call: PipelinedCall) -> PyTree[TensorSpec]:
        """Return what a stage sends to the next one for a call; leaves that are no `TensorSpec` are constants.

        Does not wait for the device, and leaves random states, buffers and gradients alone.

        Args:
            boundary_index: Index of the stage that sends.
            call: What the pipelined module is called with.

        Raises:
            RuntimeError: A layer does not run without values.
            TypeError: See `LayerCalls.routes`.
            ValueError: The module's own forward pass is another function; see `ForwardCheck`.
        """
        if self._forward_check is not None:
            self._forward_check.check(call)
        if self._transfer_spec is not None:
            return self._transfer_spec(boundary_index, *call.args, **call.kwargs)
        device = device_of(call)
        key = (
            _signature(call.args),
            _signature(call.kwargs),
            device,
            tuple([module.training for module in self._live]),
            self._precision(device.type),
        )
        try:
            known = self._known.get(key)
        except TypeError:  # an argument that is not hashable: it can not be recognised
            return self._run(call, device)[boundary_index]
        if known is None:
            known = self._run(call, device)
            if len(self._known) >= _MAX_KNOWN_FORMS:
                del self._known[next(iter(self._known))]
            self._known[key] = known
        return known[boundary_index]

    def _precision(self, device_type: str) -> tuple[torch.dtype | None, torch.dtype]:
        """Return what types results have where stages run, which another Trainer may change: of autocast, and of new ones."""
        with self._run_in():
            autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
            return autocast, torch.get_default_dtype()

    def _run(self, call: PipelinedCall, device: torch.device) -> tuple[PyTree[TensorSpec], ...]:
        """Run the copies for a call, and return what crosses each boundary.

        All boundaries at once, so that all ranks of the pipeline fail if one layer does.
        """
        routes = self._calls.routes(call).layers
        found: list[PyTree[TensorSpec]] = []
        with without_traces(), self._run_in(), self._mode:
            layers = self._on_device(device)
            fake = fake_call(call, self._mode)
            value = self._calls.value(fake)
            for start, end in self._ranges[:-1]:
                for index in range(start, end):
                    value = self._run_layer(index, layers[index], routes[index], value, fake)
                found.append(_spec_of(value))
                value = tree_map_only(torch.Tensor, _as_received, value)
                if end < len(layers) and works_in_place(layers[end]):
                    value = writable(value)
        return tuple(found)

    def _run_layer(
        self,
        index: int,
        layer: nn.Module,
        route: LayerRoute | None,
        value: Any,  # noqa: ANN401
        call: CapturedCall,
    ) -> Any:  # noqa: ANN401
        try:
            return layer(value) if route is None else route.run(layer, value, call)
        except Exception as error:
            reason = str(error).split("\n", maxsplit=1)[0].rstrip(".")
            raise RuntimeError(
                f"layer {self._names[index]!r} ({type(layer).__name__}) does not run on tensors without values, which tell "
                f"what crosses the boundaries between stages: {type(error).__name__}: {reason}. If it fails on real tensors "
                f"as well, mend that. If it reads values (item(), tolist(), nonzero(), masks as indices), or has an "
                f"operation without a fake implementation (torch's register_fake), either change it, or say what "
                f"stages send by PipelineStages(transfer_spec=function of (stage, *arguments of the call))."
            ) from error

    # Copies

    def _on_device(self, device: torch.device) -> list[nn.Module]:
        """Return the copies with fake parameters on a device, in the mode of the layers. The fake mode must be on."""
        if device not in self._by_device:
            self._by_device[device] = copy_layers(self._on_meta, device, self._mode)
        layers = self._by_device[device]
        for copied, live in zip(layers, self._live, strict=False):
            if copied.training is not live.training:
                copied.train(live.training)
        skip_sample_counts(layers)
        return layers


# Calls


def _signature(value: Any) -> object:  # noqa: ANN401
    """Return what calls of one form have in common: structure, shapes and types of tensors, and other values as they are."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    if kind in _PLAIN_TYPES:
        return kind, value
    if kind is tuple or kind is list:
        return kind, tuple([_signature(each) for each in value])
    if kind is dict:
        return kind, tuple([(key, _signature(each)) for key, each in value.items()])
    leaves, structure = tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return kind, value
    return structure, tuple([_signature(leaf) for leaf in leaves])


def _spec_of(value: PyTree[Any]) -> PyTree[TensorSpec]:
    if isinstance(value, torch.Tensor):
        return _tensor_spec(value)
    return tree_map_only(torch.Tensor, _tensor_spec, value)


def _tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype, layout=tensor.layout)


def _as_received(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a stage gets of a tensor: contiguous memory, and the start of a graph of its own."""
    return tensor.detach().contiguous().requires_grad_(tensor.requires_grad)


def writable(value: PyTree[Any]) -> PyTree[Any]:
    """Copy the tensors of an activation that a layer could not change in place, as gradients are asked for them."""
    return tree_map_only(
        torch.Tensor, lambda leaf: leaf.clone() if leaf.requires_grad and leaf.is_leaf else leaf, value
    )
