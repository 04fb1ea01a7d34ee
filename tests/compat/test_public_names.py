"""Names that jobs written for d9d 0.24 import, and the arguments that they pass: `public_names.txt` lists them.

A module stands at the margin, what it exports below it, and members of classes below these. `=` marks arguments that may be
left out.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

NAMES = Path(__file__).with_name("public_names.txt")
NOT_TAKEN_OVER = {
    # The norm is taken of the memory that holds all gradients, which the gradient manager has.
    ("d9d.loop.component", "GradientClipper.__init__"),
    ("d9d.loop.component", "GradientClipper.install"),
    # How programs talk to stages. The programs are other ones.
    *(
        ("d9d.pipelining.infra.stage", f"PipelineStage.{name}")
        for name in [
            "configure_buffers",
            "set_local_fwd_input",
            "get_produced_transfer",
            "get_pipeline_output",
            "pop_local_bwd_output",
            "set_local_bwd_input",
            "get_fwd_recv_ops",
            "get_fwd_send_ops",
            "get_bwd_recv_ops",
            "get_bwd_send_ops",
            "forward_one_chunk",
            "backward_one_chunk",
            "backward_weight_one_chunk",
            "reset",
        ]
    ),
}
NEEDS_TRITON = "d9d.kernel.stochastic.ops"


def entries() -> dict[str, list[str]]:
    """Give what each module exports, members as ``Class.member``."""
    found: dict[str, list[str]] = {}
    module, owner = "", ""
    for line in NAMES.read_text().splitlines():
        name = line.strip()
        match len(line) - len(line.lstrip()):
            case 0:
                module, found[name] = name, []
            case 2:
                owner = name
                found[module].append(name)
            case _:
                found[module].append(f"{owner}.{name}")
    return found


ENTRIES = entries()


def declares(owner: object, name: str) -> bool:
    """Tell whether a class has a member: an attribute, or a field that instances get."""
    classes = inspect.getmro(owner) if inspect.isclass(owner) else ()
    return hasattr(owner, name) or any(name in inspect.get_annotations(each) for each in classes)


def differences(target: object, arguments: str) -> Iterator[str]:
    """Say which calls that the list allows would fail."""
    ours = {name: each for name, each in inspect.signature(target).parameters.items() if name not in ("self", "cls")}
    takes_all = any(each.kind == each.VAR_KEYWORD for each in ours.values())
    theirs = [each.strip() for each in arguments.split(",") if each.strip()]
    by_position = [each for each in ours.values() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    may_be_positional = True
    for index, each in enumerate(theirs):
        name = each.rstrip("=")
        if name.startswith("*"):
            may_be_positional = False
            continue
        if name not in ours:
            if not takes_all:
                yield f"lacks {name}"
            continue
        if may_be_positional and by_position[index : index + 1] != [ours[name]]:
            yield f"{name} is not argument {index}"
        if each.endswith("=") and ours[name].default is inspect.Parameter.empty:
            yield f"{name} has no default"
    known = {each.rstrip("=").lstrip("*") for each in theirs}
    for name, each in ours.items():
        is_needed = each.default is inspect.Parameter.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        if name not in known and is_needed:
            yield f"needs {name}"


@pytest.mark.parametrize("module", ENTRIES)
def test_names_and_arguments(module: str):
    if module == NEEDS_TRITON and importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton")
    imported = importlib.import_module(module)
    problems: list[str] = []
    for entry in ENTRIES[module]:
        path, has_arguments, arguments = entry.partition("(")
        if (module, path) in NOT_TAKEN_OVER:
            continue
        owner_name, _, member = path.rpartition(".")
        owner = vars(imported).get(owner_name) if owner_name else imported
        if owner is None or not declares(owner, member):
            problems.append(f"{path} is missing")
        elif has_arguments:
            target = inspect.getattr_static(owner, member)
            target = target if inspect.isfunction(target) else getattr(owner, member)
            problems += [f"{path}: {problem}" for problem in differences(target, arguments.removesuffix(")"))]
    assert problems == []


def test_what_is_not_taken_over_is_missing_indeed():
    for module, path in NOT_TAKEN_OVER:
        assert path in [entry.partition("(")[0] for entry in ENTRIES[module]]
        owner, _, member = path.partition(".")
        assert member == "__init__" or not hasattr(getattr(importlib.import_module(module), owner), member)
