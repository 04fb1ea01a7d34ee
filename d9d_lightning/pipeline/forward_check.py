"""Hold the forward pass of a pipelined module against what stages make of it, before anything is trained.

[Note: the forward pass is the layers]
Stages run ``x = layer(x)`` over the layers, and nobody calls the module's own ``forward``. If that does more, the job would
train another function than the one that the user has written and tested. So before the module is cut, it is copied without
data, and at the first call the copy's ``forward`` runs on fake tensors, see [Note: layers without data]. Hooks compare
objects, not values: each layer must get the very object that the layer before it has returned, unchanged, and the further
arguments that stages give it. That is exact but for forms of the module that depend on values, or on what the first call in
a mode is like. All ranks have the same copy and the same call up to its data, so all of them fail, without communication.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from d9d.core.pytree import PyTreeSpec, tree_flatten
from d9d_lightning.pipeline.dataless import (
    copy_whole,
    device_of,
    fake_call,
    new_fake_mode,
    skip_sample_counts,
    without_traces,
)
from d9d_lightning.pipeline.stage_calls import LayerCalls, LayerRoute, PipelinedCall, argument
from d9d_lightning.pipeline.stage_cut import is_plain_sequential

__all__ = ["ForwardCheck"]

ContextFactory: TypeAlias = Callable[[], contextlib.AbstractContextManager[Any]]

_BY_HAND = (
    "Stages compute x = layer(x) and nothing else: compare the loss of a batch with pipeline_parallel=1, and say "
    "PipelineStages(checks_forward=False) if it is the same."
)
_ABSENT = object()


# `Any` in this module: the user's own arguments and activations.
class ForwardCheck:
    """Refuses a module whose forward pass is not ``x = layer(x)``. See [Note: the forward pass is the layers]."""

    def __init__(
        self,
        pipelined: nn.Module,
        layer_names: Sequence[str],
        calls: LayerCalls,
        *,
        run_in: ContextFactory = contextlib.nullcontext,
    ) -> None:
        """Copy the module without its data. Warns if it can not be copied; nothing is checked then.

        Args:
            pipelined: The whole module with its own ``forward``. Its mode is followed, so it is kept.
            layer_names: Its layers in calling order.
            calls: What stages call the layers with.
            run_in: What stages run in.
        """
        self._pipelined = pipelined
        self._names = tuple(layer_names)
        self._calls = calls
        self._run_in = run_in
        self._mode = new_fake_mode()
        self._unchecked_modes = {True, False}
        self._copy: tuple[nn.Module, list[nn.Module]] | None = None
        if is_plain_sequential(pipelined) and self._names == tuple(name for name, _ in pipelined.named_children()):
            return
        layers = [pipelined.get_submodule(name) for name in layer_names]
        try:
            self._copy = copy_whole(pipelined, layers, torch.device("meta"), self._mode)
        except Exception as error:  # noqa: BLE001  # whatever a user's attributes raise, such as locks and open files
            self._warn("the module can not be copied", error)

    def check(self, call: PipelinedCall) -> None:
        """Run the copy for the first call in training, and for the first one in evaluation; other calls cost nothing.

        Does not wait for the device, and leaves random states and buffers alone. All ranks of the pipeline must call it.

        Args:
            call: What the pipelined module is called with.

        Raises:
            TypeError: See `LayerCalls.routes`.
            ValueError: The forward pass is another function, with the first difference. Raised for each call.
        """
        training = self._pipelined.training
        if self._copy is None or training not in self._unchecked_modes:
            return
        difference = self._run(self._copy, call)
        if difference is not None:
            raise ValueError(
                f"forward() of {type(self._pipelined).__name__} {difference}: stages call the layers alone, x = layer(x), "
                f"and would compute something else. Put what happens in between into a layer, what is made for the layers "
                f"(such as a mask) into the layers or the arguments of the call, or correct "
                f"PipelineStages(layers=[...], with_arguments=[...]). If it makes no difference to the result, say "
                f"PipelineStages(checks_forward=False)."
            )
        self._unchecked_modes.discard(training)
        if not self._unchecked_modes:
            self._copy = None

    def _run(self, on_meta: tuple[nn.Module, list[nn.Module]], call: PipelinedCall) -> str | None:
        routes = self._calls.routes(call).layers
        trace: _Trace | None = None
        try:
            with without_traces(), self._run_in(), self._mode:
                module, layers = copy_whole(*on_meta, device_of(call), self._mode)
                self._follow_mode(module)
                fake = fake_call(call, self._mode)
                trace = _Trace(self._names, layers, self._calls.value(fake), fake, routes)
                returned = module.forward(*fake.args, **fake.kwargs)
                trace.finish(returned)
        except Exception as error:  # noqa: BLE001  # the user's code, without values
            if trace is None or trace.difference is None:
                mode = "training" if self._pipelined.training else "evaluation"
                self._warn(f"it does not run on tensors without values in {mode}", error)
        return None if trace is None else trace.difference

    def _follow_mode(self, module: nn.Module) -> None:
        """Let the copy be in the mode of the live module, whose layers of other ranks are placeholders."""
        live = dict(self._pipelined.named_modules(remove_duplicate=False))
        for name, copied in module.named_modules(remove_duplicate=False):
            if name not in live:  # inside of a placeholder: its parents come first
                continue
            if name in self._names and copied.training is not live[name].training:
                copied.train(live[name].training)
            copied.training = live[name].training
        skip_sample_counts([module])

    def _warn(self, why: str, error: Exception) -> None:
        reason = str(error).split("\n", maxsplit=1)[0].rstrip(".")
        rank_zero_warn(
            f"forward() of {type(self._pipelined).__name__} could not be held against its layers, as {why} "
            f"({type(error).__name__}: {reason}). {_BY_HAND}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Snapshot:
    """An activation or argument at some time: the objects, and how often tensors had been changed in place."""

    leaves: list[Any]
    structure: PyTreeSpec
    versions: list[int]

    @classmethod
    def of(cls, value: Any) -> "_Snapshot":  # noqa: ANN401
        leaves, structure = tree_flatten(value)
        return cls(leaves, structure, [_version(leaf) for leaf in leaves])

    def is_same(self, value: Any) -> bool:  # noqa: ANN401
        """Tell whether a value has the same objects, whatever has been done to them."""
        leaves, structure = tree_flatten(value)
        return structure == self.structure and all(map(_is_same_leaf, self.leaves, leaves))

    def is_changed(self) -> bool:
        """Tell whether tensors have been changed in place since."""
        return self.versions != [_version(leaf) for leaf in self.leaves]


class _Trace:
    """Follows a run of the module by hooks on its layers, up to the first difference."""

    def __init__(
        self,
        names: Sequence[str],
        layers: Sequence[nn.Module],
        value: Any,  # noqa: ANN401
        call: PipelinedCall,
        routes: Sequence[LayerRoute | None],
    ) -> None:
        self.difference: str | None = None
        """What the module does otherwise, as the end of a sentence about its forward pass."""
        self._names = names
        self._layers = layers
        self._handed = _Snapshot.of(value)
        self._origin = "the first argument of the call"
        self._signatures = [_signature(layer) for layer in layers]
        self._further = [
            {name: _Snapshot.of(each) for name, each in _further(signature, *_given(route, value, call)).items()}
            for signature, route in zip(self._signatures, routes, strict=True)
        ]
        self._num_called = 0
        self._depth = 0  # a layer may have another one as a child
        self._name_of = dict(zip(layers, names, strict=True))
        for layer in self._name_of:
            layer.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
            layer.register_forward_hook(self._leave)

    def finish(self, returned: Any) -> None:  # noqa: ANN401
        """Compare what the module returns."""
        if self._num_called < len(self._names):
            self._differs(f"does not call layer {self._names[self._num_called]!r}{self._again(self._num_called)}")
        elif not self._handed.is_same(returned):
            self._differs(f"returns something else than its last layer {self._names[-1]!r}")
        elif self._handed.is_changed():
            self._differs(f"changes in place what its last layer {self._names[-1]!r} returns")

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        if self._depth > 1 or self.difference is not None:
            return
        name, position = self._name_of[layer], self._num_called
        if position == len(self._names):
            self._differs(f"calls layer {name!r} after the last one of layers=")
        elif layer is not self._layers[position]:
            self._differs(f"calls layer {name!r} where {self._names[position]!r} comes next in layers=")
        else:
            self._compare_input(position, args, kwargs)

    def _compare_input(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, signature = self._names[position], self._signatures[position]
        if not self._handed.is_same(_first(signature, args, kwargs)):
            self._differs(f"hands layer {name!r} something else than {self._origin}")
        elif self._handed.is_changed():
            self._differs(f"changes {self._origin} in place before layer {name!r} gets it")
        expected, given = self._further[position], _further(signature, args, kwargs)
        for key in {**expected, **given}:
            before = expected.get(key)
            if before is None or key not in given or not before.is_same(given[key]):
                self._differs(f"calls layer {name!r} with another {key!r} than stages do")
            elif before.is_changed():
                self._differs(f"changes {key!r} in place before layer {name!r} gets it")

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
        self._depth -= 1
        if self._depth or self.difference is not None:
            return
        self._handed = _Snapshot.of(output)
        self._origin = f"what {self._name_of[layer]!r} returns"
        self._num_called += 1

    def _again(self, position: int) -> str:
        num_before = self._names[:position].count(self._names[position])
        return f" {num_before + 1} times, as layers= does" if num_before else ""

    def _differs(self, difference: str) -> None:
        self.difference = self.difference or difference


def _given(
    route: LayerRoute | None,
    value: Any,  # noqa: ANN401
    call: PipelinedCall,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what stages call a layer with."""
    if route is None:
        return (value,), {}
    keywords = {name: argument(call, source) for name, source in route.keywords.items()}
    return (value, *[call.args[index] for index in route.positional]), {**keywords, **route.fixed}


def _signature(layer: nn.Module) -> inspect.Signature | None:
    try:
        return inspect.signature(layer.forward)
    except (TypeError, ValueError):  # compiled code has none
        return None


def _first(signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    if args:
        return args[0]
    name = next(iter(signature.parameters), "") if signature is not None else next(iter(kwargs), "")
    return kwargs.get(name, _ABSENT)


def _further(signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name the arguments of a layer but for the first one, so that it does not matter how they were given."""
    try:
        bound = None if signature is None else signature.bind(*args, **kwargs)
    except TypeError:  # the call is going to fail
        bound = None
    if signature is None or bound is None:
        return {**{f"argument {index}": each for index, each in enumerate(args[1:], start=1)}, **kwargs}
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for index, (name, parameter) in enumerate(signature.parameters.items()):
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found.update(bound.arguments[name])
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            found[name] = bound.arguments[name][0 if index else 1 :]
        elif index:
            found[name] = bound.arguments[name]
    return found


def _version(leaf: Any) -> int:  # noqa: ANN401
    if not isinstance(leaf, torch.Tensor) or leaf.is_inference():
        return 0
    return leaf._version  # pyright: ignore[reportPrivateUsage]  # no public name


def _is_same_leaf(first: Any, second: Any) -> bool:  # noqa: ANN401
    if first is second:
        return True
    if isinstance(first, torch.Tensor) or type(first) is not type(second):
        return False
    try:
        return bool(first == second)
    except Exception:  # noqa: BLE001  # objects of any class; arrays have no one answer
        return False
