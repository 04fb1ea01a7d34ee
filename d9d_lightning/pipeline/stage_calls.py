"""Which arguments of the pipelined call each layer is called with."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import nn

from d9d.core.module_names import matches

__all__ = ["CallRoutes", "LayerCalls", "LayerRoute", "PipelinedCall"]

Source: TypeAlias = int | str
"""Where an argument comes from: an index of the call's positional arguments, or the name of a keyword argument."""


# `Any` in this module: the user's own arguments.
class PipelinedCall(Protocol):
    """What the pipelined module is called with for a microbatch."""

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments."""
        ...

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Keyword arguments."""
        ...


def argument(call: PipelinedCall, source: Source) -> Any:  # noqa: ANN401
    """Take one argument out of a call."""
    return call.args[source] if isinstance(source, int) else call.kwargs[source]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRoute:
    """What a layer is called with besides the value that goes through the stages."""

    positional: tuple[int, ...]
    """Indices of the call's positional arguments."""
    keywords: Mapping[str, Source]
    """Keyword arguments of the layer."""
    fixed: Mapping[str, Any]
    """Defaults of the pipelined module's ``forward``, which it would hand on."""

    def run(self, layer: nn.Module, value: Any, call: PipelinedCall) -> Any:  # noqa: ANN401
        """Call the layer."""
        positional = [call.args[index] for index in self.positional]
        keywords = {name: argument(call, source) for name, source in self.keywords.items()}
        return layer(value, *positional, **keywords, **self.fixed)


@dataclasses.dataclass(frozen=True, slots=True)
class CallRoutes:
    """How a call of some form is spread over the layers."""

    value: Source
    """The argument that enters the first layer."""
    layers: tuple[LayerRoute | None, ...]
    """By position of the layer; None for one that takes the value alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Form:
    """A call of some form, as the signature of the pipelined module names its arguments."""

    num_positional: int
    value: Source
    named: Mapping[str, Source]
    """Further arguments by their names."""
    nameless: tuple[int, ...]
    """Further positional arguments that have none."""
    defaults: Mapping[str, Any]
    """Parameters that the call leaves out."""

    @property
    def extras(self) -> set[Source]:
        return {*self.named.values(), *self.nameless}


@dataclasses.dataclass(frozen=True, slots=True)
class _Accepted:
    """What the ``forward`` of a layer takes besides its first argument."""

    positional: tuple[str, ...] = ()
    by_name: frozenset[str] = frozenset()
    required: tuple[str, ...] = ()
    any_positional: bool = False
    any_name: bool = False


class LayerCalls:
    """Spreads the arguments of the pipelined call over its layers.

    [Note: what a layer is called with]
    The first argument goes through the layers, one after another. The further ones go to the layers that
    `with_arguments` matches, all of them, as they are in the call. Without it, names decide: a layer gets the arguments
    whose names its ``forward`` has, or all if it has ``**kwargs``. A positional argument has the name that the
    ``forward`` of the pipelined module gives it, and what the call leaves out is there with its default. By position go
    those that have no name, to layers that take so many, and those without which a layer can not be called. An optional
    parameter of another name is never filled by position: an LSTM would take a mask for its initial state.
    An argument that reaches no layer is an error, as it would be ignored.
    """

    def __init__(
        self, pipelined: nn.Module, layer_names: Sequence[str], with_arguments: Sequence[str] | None = None
    ) -> None:
        """Read the signatures of the whole module, before anything in it is replaced or wrapped.

        Args:
            pipelined: The module that is cut, with its own ``forward``.
            layer_names: Its layers in calling order.
            with_arguments: Patterns of the layers that take the further arguments. None: see the note.
        """
        self._owner = type(pipelined).__name__
        self._names = tuple(layer_names)
        self._signature = _signature(pipelined.forward)
        self._accepted = [_accepted(pipelined.get_submodule(name).forward) for name in layer_names]
        self._chosen = None if with_arguments is None else _matching(layer_names, with_arguments)
        self._routes: dict[tuple[object, ...], CallRoutes] = {}

    def routes(self, call: PipelinedCall) -> CallRoutes:
        """Return where the arguments of a call go; found once for each form of call.

        Raises:
            TypeError: The call does not fit the pipelined module, an argument reaches no layer, or a layer needs one that
                the call does not give.
        """
        key = (len(call.args), *call.kwargs)
        routes = self._routes.get(key)
        if routes is None:
            routes = self._routes[key] = self._find(len(call.args), tuple(call.kwargs))
        return routes

    def value(self, call: PipelinedCall) -> Any:  # noqa: ANN401
        """Return the argument that enters the first layer."""
        return argument(call, self.routes(call).value)

    def _find(self, num_positional: int, names: tuple[str, ...]) -> CallRoutes:
        form = self._form(num_positional, names)
        problems: list[str] = []
        layers: list[LayerRoute | None] = []
        for index, name in enumerate(self._names):
            if self._chosen is None:
                route, missing = _route_by_name(form, self._accepted[index])
                problems += [
                    f"layer {name!r} needs an argument {each!r}, which the call does not give" for each in missing
                ]
            elif name in self._chosen:
                keywords = {each: each for each in names if each != form.value}
                route = LayerRoute(tuple(range(1, num_positional)), keywords, {})
            else:
                route = LayerRoute((), {}, {})
            layers.append(route if route.positional or route.keywords or route.fixed else None)
        problems += self._unreached(form, layers)
        if problems:
            raise TypeError(f"the pipelined call of {self._owner}: {'; '.join(problems)}.")
        return CallRoutes(form.value, tuple(layers))

    def _form(self, num_positional: int, names: tuple[str, ...]) -> _Form:
        """Name the arguments of a call by binding their sources."""
        if self._signature is None:
            named: dict[str, Source] = {name: name for name in names}
            nameless = tuple(range(num_positional))
            defaults: dict[str, Any] = {}
            first_name = ""
        else:
            named, nameless, defaults = _bind(self._signature, num_positional, names, self._owner)
            first_name = next(iter(self._signature.parameters), "")
        value: Source
        if num_positional:
            value = 0
        elif first_name in names:
            value = first_name
        elif len(names) == 1:
            value = names[0]
        else:
            raise TypeError(
                f"the pipelined call of {self._owner} has the keyword arguments {', '.join(names) or '(none)'}, and it is "
                f"not clear which of them goes through the layers: give that one as the first positional argument."
            )
        return _Form(
            num_positional=num_positional,
            value=value,
            named={name: source for name, source in named.items() if source != value},
            nameless=tuple(source for source in nameless if source != value),
            defaults=defaults,
        )

    def _unreached(self, form: _Form, layers: Sequence[LayerRoute | None]) -> list[str]:
        reached: set[Source] = set()
        for route in layers:
            if route is not None:
                reached.update(route.positional)
                reached.update(route.keywords.values())
        names = {source: name for name, source in form.named.items()}
        problems: list[str] = []
        for source in sorted(form.extras - reached, key=str):
            what = f"argument {source}" if isinstance(source, int) else "keyword argument"
            what += f" ({names[source]!r})" if source in names else ""
            problems.append(
                f"{what} reaches no layer. Say by PipelineStages(with_arguments=[...]) which layers are called with the "
                f"further arguments, give them a parameter of this name, or leave it out"
            )
        return problems


def _signature(forward: Callable[..., Any]) -> inspect.Signature | None:
    try:
        signature = inspect.signature(forward)
    except (TypeError, ValueError):  # compiled code has none
        return None
    return signature


def _accepted(forward: Callable[..., Any]) -> _Accepted:
    signature = _signature(forward)
    if signature is None:
        return _Accepted()
    parameters = list(signature.parameters.values())
    kinds = inspect.Parameter
    if parameters and parameters[0].kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD):
        del parameters[0]
    positional = [each for each in parameters if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    by_name = [each for each in parameters if each.kind in (kinds.KEYWORD_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    return _Accepted(
        positional=tuple(each.name for each in positional),
        by_name=frozenset(each.name for each in by_name),
        required=tuple(each.name for each in by_name if each.default is kinds.empty),
        any_positional=any(each.kind is kinds.VAR_POSITIONAL for each in parameters),
        any_name=any(each.kind is kinds.VAR_KEYWORD for each in parameters),
    )


def _bind(
    signature: inspect.Signature, num_positional: int, names: Sequence[str], owner: str
) -> tuple[dict[str, Source], tuple[int, ...], dict[str, Any]]:
    """Return the source of each named argument, the positional ones without name, and the defaults of the others."""
    try:
        bound = signature.bind(*range(num_positional), **{name: name for name in names})
    except TypeError as error:
        raise TypeError(f"the pipelined call does not fit {owner}.forward{signature}: {error}.") from error
    named: dict[str, Source] = {}
    nameless: tuple[int, ...] = ()
    defaults: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if name not in bound.arguments:
            if parameter.default is not inspect.Parameter.empty:
                defaults[name] = parameter.default
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            nameless = bound.arguments[name]
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(bound.arguments[name])
        else:
            named[name] = bound.arguments[name]
    return named, nameless, defaults


def _route_by_name(form: _Form, accepted: _Accepted) -> tuple[LayerRoute, list[str]]:
    """Choose the arguments of a layer, and name those it needs but does not get. See [Note: what a layer is called with]."""
    keywords = {name: source for name, source in form.named.items() if accepted.any_name or name in accepted.by_name}
    positional = form.nameless
    filled = set(accepted.positional[: len(positional)])
    if not accepted.any_positional and len(accepted.positional) < len(positional):
        positional, filled = (), set()
    # What comes after `*args` in the call can not be both.
    keywords = {name: source for name, source in keywords.items() if name not in filled}
    fixed = {name: value for name, value in form.defaults.items() if name in accepted.by_name and name not in filled}
    missing: list[str] = []
    for name in accepted.required:
        if name in keywords or name in fixed or name in filled:
            continue
        index = accepted.positional.index(name) + 1 if name in accepted.positional else form.num_positional
        if index < form.num_positional:
            keywords[name] = index
        else:
            missing.append(name)
    return LayerRoute(positional, keywords, fixed), missing


def _matching(names: Sequence[str], patterns: Sequence[str]) -> frozenset[str]:
    return frozenset(name for name in names if any(matches(name, pattern) for pattern in patterns))
