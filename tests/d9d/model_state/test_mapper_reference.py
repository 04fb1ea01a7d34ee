"""Mappers by name: what is called with what, and what is said of a reference that leads nowhere."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper_reference import load_mapper

MODULE = """
from d9d.model_state.mapper.leaf import ModelStateMapperRename
from d9d.model_state.mapper.compose import ModelStateMapperParallel

NUMBER = 3

def from_huggingface():
    return ModelStateMapperRename("a", "b")

def with_names(names):
    return ModelStateMapperParallel([ModelStateMapperRename(name, f"new.{name}") for name in names])

def with_default(num_layers=2, *rest, **more):
    return ModelStateMapperRename("a", str(num_layers))

def with_layers(num_layers):
    return ModelStateMapperRename("a", str(num_layers))

def returns_nothing():
    pass

def fails():
    raise KeyError("hidden_size")
"""

WriteModule = Callable[[str, str], None]


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteModule:
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "reference_pkg"]:
        monkeypatch.delitem(sys.modules, name)

    def write(name: str, text: str) -> None:
        path = tmp_path.joinpath("reference_pkg", *name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text, encoding="utf-8")

    return write


def groups(mapper: ModelStateMapper) -> set[StateGroup]:
    return set(mapper.state_dependency_groups())


def group(source: str, target: str) -> StateGroup:
    return StateGroup(inputs=frozenset([source]), outputs=frozenset([target]))


def test_functions_get_what_they_ask_for(write_module: WriteModule):
    write_module("mappers", MODULE)
    names = ["x", "y"]
    assert groups(load_mapper("reference_pkg.mappers:from_huggingface", names)) == {group("a", "b")}
    assert groups(load_mapper("reference_pkg.mappers:with_default", names)) == {group("a", "2")}
    assert groups(load_mapper("reference_pkg.mappers:with_names", names)) == {group("x", "new.x"), group("y", "new.y")}


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("reference_pkg.mappers", "must have the form pkg.module:function"),
        (":function", "must have the form pkg.module:function"),
        ("reference_pkg/mappers.py:from_huggingface", "as a module, not as a file: reference_pkg.mappers:"),
        (
            "reference_pkg.mapers:f",
            "no module reference_pkg.mapers, looked up as by `python -m`: did you mean reference_pkg.mappers?",
        ),
        ("refrence_pkg.mappers:f", "no module refrence_pkg, looked up as by `python -m`: did you mean reference_pkg?"),
        ("reference_pkg.mappers.deep:f", "there is no module reference_pkg.mappers.deep"),
        ("reference_pkg.broken:f", "reference_pkg.broken cannot be imported: ModuleNotFoundError"),
        ("reference_pkg.syntax:f", "reference_pkg.syntax cannot be imported: SyntaxError"),
        ("reference_pkg.mappers:from_hugginface", "is not there: did you mean from_huggingface?"),
        ("reference_pkg.mappers:zzz", "; it has fails, from_huggingface, returns_nothing, with_default"),
        ("reference_pkg.mappers:NUMBER", "reference_pkg.mappers:NUMBER is no function"),
        ("reference_pkg.mappers:with_layers", "takes num_layers. Name a function without arguments"),
        ("reference_pkg.mappers:returns_nothing", "returned a NoneType. It must return a ModelStateMapper"),
        ("reference_pkg.mappers:fails", "failed: KeyError: 'hidden_size' ("),
    ],
)
def test_what_leads_nowhere_is_refused(write_module: WriteModule, reference: str, problem: str):
    write_module("mappers", MODULE)
    write_module("broken", "import this_is_not_installed")
    write_module("syntax", "def f(:")
    with pytest.raises(ValueError, match=re.escape(problem)) as caught:
        load_mapper(reference, [])
    assert "\n" not in str(caught.value)


def test_the_place_of_a_failure_is_named(write_module: WriteModule, tmp_path: Path):
    write_module("mappers", MODULE)
    line = MODULE.splitlines().index('    raise KeyError("hidden_size")') + 1
    with pytest.raises(ValueError, match=f"mappers.py, line {line}"):
        load_mapper("reference_pkg.mappers:fails", [])
