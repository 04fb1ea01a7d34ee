"""Modules and calls without data: copies that run on fake tensors.

[Note: layers without data]
Every rank must know what the stages before its own send, though it has none of their layers. So before the module is cut,
its layers are copied without their data: parameters and buffers of the copies are on the meta device. For a call of some
form the copies run on fake tensors, which have shapes, types and a device, but no values, with fake parameters on the
device of the call. This costs some milliseconds a layer and is kept for further calls of the same form. Collectives do
nothing with fake tensors. Values that decide about shapes are not there: a layer that looks at them needs `transfer_spec`.
"""
# fake tensors have no public name yet (torch 2.13); the fallback of a copy takes modules apart
# pyright: reportPrivateUsage=false

import contextlib
import copy
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias, cast

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from d9d.core.pytree import tree_leaves, tree_map_only
from d9d_lightning.pipeline.call import CapturedCall
from d9d_lightning.pipeline.stage_calls import PipelinedCall

__all__ = [
    "FakeTensorMode",
    "copy_layers",
    "copy_whole",
    "device_of",
    "fake_call",
    "new_fake_mode",
    "skip_sample_counts",
    "without_traces",
]

_Memo: TypeAlias = dict[int, Any]
"""What `copy.deepcopy` takes instead of a copy, by identity of the original."""


def new_fake_mode() -> FakeTensorMode:
    """Return what fake tensors belong to; tensors with data are taken for fakes under it."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def without_traces() -> Generator[None]:
    """Leave random states alone, run compiled code eagerly, and take no short cuts of inference."""
    with contextlib.ExitStack() as stack:
        # Fake operations draw no numbers; code in Python may. Not on accelerators, which asking would start.
        stack.enter_context(isolate_rng(include_cuda=False))
        if "torch._dynamo" in sys.modules:  # else nothing has been compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        yield


# Copies


def skip_sample_counts(modules: Sequence[nn.Module]) -> None:
    """Let synchronized norms run as in evaluation: in training they look at how many samples each rank has.

    Shapes are the same.
    """
    for child in (child for module in modules for child in module.modules()):
        if isinstance(child, nn.SyncBatchNorm):
            child.training = False


def copy_layers(layers: Sequence[nn.Module], device: torch.device, mode: FakeTensorMode) -> list[nn.Module]:
    """Copy layers with parameters and buffers that have no data, on the meta device or as fakes on another one.

    Attributes of a layer that can not be copied are shared with it. For fakes the mode must be on.
    """
    return _copy_layers(layers, _empty_tensors(layers, device), mode)


def copy_whole(
    module: nn.Module, layers: Sequence[nn.Module], device: torch.device, mode: FakeTensorMode
) -> tuple[nn.Module, list[nn.Module]]:
    """Copy a module that has layers, as `copy_layers`, and return the copies of both.

    Raises:
        Exception: What the module's own attributes raise. Nothing of it is shared, as its code may reach the layers by any
            of them.
    """
    memo = _empty_tensors([module], device)
    copies = _copy_layers(layers, memo, mode)
    with _FakeCopies(mode):
        return copy.deepcopy(module, memo), copies


def _copy_layers(layers: Sequence[nn.Module], memo: _Memo, mode: FakeTensorMode) -> list[nn.Module]:
    copies: list[nn.Module] = []
    for layer in layers:
        attempt = dict(memo)  # one that fails leaves half a layer behind
        try:
            with _FakeCopies(mode):
                copies.append(copy.deepcopy(layer, attempt))
        except Exception:  # noqa: BLE001  # whatever a user's attributes raise, such as locks and open files
            copies.append(_copy_by_structure(layer, memo))
        else:
            # By its own id a memo keeps what it knows the ids of, so that nothing else gets them meanwhile.
            kept = attempt.pop(id(attempt), [])
            memo.update(attempt)
            memo.setdefault(id(memo), []).extend(kept)
    return copies


def _empty_tensors(modules: Sequence[nn.Module], device: torch.device) -> _Memo:
    memo: _Memo = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in memo:
                memo[id(tensor)] = _empty_like(tensor, device)
    return memo


class _FakeCopies(TorchFunctionMode):
    """Lets `copy.deepcopy` make tensors without data of those that are neither parameters nor buffers."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        # A parameter that belongs to something else is copied by `clone`.
        if func is torch.Tensor.__deepcopy__ or func is torch.Tensor.clone:
            tensor = args[0]
            return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor.detach())
        return func(*args, **(kwargs or {}))


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty_like(tensor.detach(), device=device)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _copy_by_structure(module: nn.Module, memo: _Memo) -> nn.Module:
    """Copy a tree of modules whose attributes can not be copied: these are shared with the original."""
    known = memo.get(id(module))
    if known is not None:
        return cast("nn.Module", known)
    clone = object.__new__(type(module))
    memo[id(module)] = clone
    state = dict(vars(module))
    for kind in ("_parameters", "_buffers"):
        state[kind] = {key: None if tensor is None else memo[id(tensor)] for key, tensor in state[kind].items()}
    state["_modules"] = {
        key: None if child is None else _copy_by_structure(child, memo) for key, child in module._modules.items()
    }
    vars(clone).update(state)
    return clone


# Calls


def fake_call(call: PipelinedCall, mode: FakeTensorMode) -> CapturedCall:
    """Return a call with tensors without memory in the place of its own; the mode must be on.

    A tensor that the call has in several places is one tensor there as well.
    """
    known: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = _fake(tensor, mode)
        return known[id(tensor)]

    return CapturedCall(
        args=tree_map_only(torch.Tensor, fake, call.args),
        kwargs=tree_map_only(torch.Tensor, fake, dict(call.kwargs)),
    )


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return mode.from_tensor(tensor.detach())
    # Under the fake mode this makes a tensor without memory, and knows nothing of the original.
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad
    )


def device_of(call: PipelinedCall) -> torch.device:
    """Return the device of the first tensor of a call."""
    if call.args and isinstance(call.args[0], torch.Tensor):
        return call.args[0].device
    leaves = tree_leaves((call.args, dict(call.kwargs)))
    return next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
