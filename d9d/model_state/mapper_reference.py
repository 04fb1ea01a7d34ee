"""Mappers by name: ``pkg.module:function``, as command lines and config files have it."""

import difflib
import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any

from d9d.model_state.mapper.adapters import identity_mapper_from_names
from d9d.model_state.mapper.base import ModelStateMapper

__all__ = ["describe_with_place", "identity_mapper_from_names", "load_mapper"]

_NAMES = "names"
_FORM = "pkg.module:function"


def load_mapper(reference: str, names: Sequence[str]) -> ModelStateMapper:
    """Call the function that a reference leads to, and return the mapper that it returns.

    Args:
        reference: ``pkg.module:function``. The module is imported; the function takes no argument, or one called
            ``names``: the names of all tensors of the source, sorted.
        names: These names.

    Raises:
        ValueError: If there is no such function (with the nearest names), or it fails, or returns no mapper.
    """
    module_name, colon, function_name = reference.partition(":")
    if not (module_name and colon and function_name):
        raise ValueError(f"the mapper {reference!r} must have the form {_FORM}.")
    function = _find_function(_import(module_name), function_name)
    arguments = _arguments(reference, function, names)
    try:
        mapper = function(**arguments)
    except Exception as error:
        raise ValueError(f"{reference} failed: {describe_with_place(error)}.") from error
    if not isinstance(mapper, ModelStateMapper):
        raise ValueError(f"{reference} returned a {type(mapper).__name__}. It must return a ModelStateMapper.")
    return mapper


def describe_with_place(error: BaseException) -> str:
    """Return type, message and place of an error in somebody's code, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}{place}" if message else f"{type(error).__name__}{place}"


def _import(name: str) -> ModuleType:
    if "/" in name or name.endswith(".py"):
        dotted = name.removesuffix(".py").strip("/.").replace("/", ".")
        raise ValueError(f"the mapper {name!r} must be named as a module, not as a file: {dotted}:function.")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{name}.".startswith(f"{missing}."):  # the module is there, but one that it imports is not
            raise ValueError(f"{name} cannot be imported: {describe_with_place(error)}.") from error
        parent, _, last = missing.rpartition(".")
        hint = _nearest(last, _modules_in(parent), f"{parent}." if parent else "")
        raise ValueError(f"there is no module {missing}, looked up as by `python -m`{hint or '.'}") from error
    except Exception as error:
        raise ValueError(f"{name} cannot be imported: {describe_with_place(error)}.") from error


def _modules_in(package: str) -> set[str]:
    paths = vars(sys.modules[package]).get("__path__", []) if package else None
    return {module.name for module in pkgutil.iter_modules(paths)}


# Any: the function is the user's.
def _find_function(module: ModuleType, name: str) -> Callable[..., Any]:
    functions = {key: value for key, value in vars(module).items() if callable(value)}
    if name not in functions:
        own = [key for key, value in functions.items() if _module_of(value) == module.__name__]
        hint = _nearest(name, functions, "") or (f"; it has {', '.join(sorted(own)[:10])}" if own else "")
        what = "is no function" if name in vars(module) else "is not there"
        raise ValueError(f"{module.__name__}:{name} {what}{hint}.")
    return functions[name]


def _module_of(function: Callable[..., Any]) -> str | None:
    return getattr(function, "__module__", None)  # introspection: not every callable has it


def _nearest(name: str, known: Collection[str], prefix: str) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    return f": did you mean {' or '.join(prefix + match for match in near)}?" if near else ""


def _arguments(reference: str, function: Callable[..., Any], names: Sequence[str]) -> dict[str, Sequence[str]]:
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty and parameter.kind not in optional
    ]
    if needed not in ([], [_NAMES]):
        raise ValueError(
            f"{reference} takes {', '.join(needed)}. Name a function without arguments, or with one called {_NAMES}, "
            "which gets the names of the source."
        )
    return dict.fromkeys(needed, names)
