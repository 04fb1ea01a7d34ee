"""The budgets of the code base: sizes, nesting, annotations, docstrings, and what is not used at all."""

import ast
import re

import pytest

from tests.repo.source_tree import (
    PACKAGE_FILES,
    PACKAGE_FUNCTIONS,
    Function,
    SourceFile,
    listed,
    python_files,
)

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
WANTED_FUNCTION_LINES = 40
MIN_SHARE_OF_WANTED = 0.97  # some functions are one long flat list of steps or cases
DEEP_NESTING = 4
MAX_SHARE_OF_DEEP = 0.01
LINES_PER_ASSERT = 1000
MAX_COMMENT_SHARE = 0.12  # 5 to 8 lines in 100 are wanted

NESTING_STATEMENTS = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.TryStar,
    ast.Match,
)
STRING_ACCESS = {"getattr", "setattr", "hasattr", "delattr"}


def test_no_file_is_longer_than_its_budget():
    too_long = [f"{file.name}: {len(file.lines)}" for file in PACKAGE_FILES if len(file.lines) > MAX_FILE_LINES]
    assert not too_long, f"split these files (more than {MAX_FILE_LINES} lines):{listed(too_long)}"


def test_no_function_is_longer_than_its_budget():
    too_long = [f"{f.where}: {f.num_lines} lines" for f in PACKAGE_FUNCTIONS if f.num_lines > MAX_FUNCTION_LINES]
    assert not too_long, f"functions over {MAX_FUNCTION_LINES} lines:{listed(too_long)}"


def test_most_functions_have_the_wanted_length():
    longer = [f"{f.where}: {f.num_lines} lines" for f in PACKAGE_FUNCTIONS if f.num_lines > WANTED_FUNCTION_LINES]
    allowed = round(len(PACKAGE_FUNCTIONS) * (1 - MIN_SHARE_OF_WANTED))
    assert len(longer) <= allowed, f"over {WANTED_FUNCTION_LINES} lines, only {allowed} may be:{listed(longer)}"


def nesting(node: ast.AST) -> int:
    """Depth of the statements below `node`. An `elif` continues its `if`; a nested function starts anew."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        opens = isinstance(child, NESTING_STATEMENTS) and not is_elif
        deepest = max(deepest, nesting(child) + opens)
    return deepest


def test_deep_nesting_is_rare():
    deep = [f.where for f in PACKAGE_FUNCTIONS if nesting(f.node) >= DEEP_NESTING]
    allowed = int(len(PACKAGE_FUNCTIONS) * MAX_SHARE_OF_DEEP)
    assert len(deep) <= allowed, f"nested {DEEP_NESTING} levels or deeper, only {allowed} may be:{listed(deep)}"


@pytest.mark.parametrize(
    ("source", "depth"),
    [
        ("x = 1", 0),
        ("if a: b", 1),
        ("if a: b\nelif c: d\nelse: e", 1),
        ("for a in b:\n  if c:\n    with d: e", 3),
        ("if a: b\nelse:\n  x = 1\n  if c: d", 2),
        ("for a in b:\n  def f():\n    if c: d", 1),
    ],
)
def test_nesting_counts_levels_as_a_reader_does(source: str, depth: int):
    assert nesting(ast.parse(source)) == depth


def unannotated(function: Function) -> list[str]:
    arguments = function.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if function.is_method and not has_decorator(function.node, "staticmethod"):
        positional = positional[1:]
    rest = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
    missing = [a.arg for a in [*positional, *arguments.kwonlyargs, *rest] if a.annotation is None]
    return missing if function.node.returns is not None else [*missing, "return"]


def has_decorator(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, *names: str) -> bool:
    """Tell if a decorator is called one of `names`, with whatever stands before the last dot."""
    return any(ast.unparse(decorator).split("(")[0].split(".")[-1] in names for decorator in node.decorator_list)


def test_every_function_is_annotated():
    missing = [f"{f.where}: {', '.join(names)}" for f in PACKAGE_FUNCTIONS if (names := unannotated(f))]
    assert not missing, f"without annotation:{listed(missing)}"


def undocumented(body: list[ast.stmt], prefix: str) -> list[str]:
    """Public names in `body` without docstring; in classes, their public methods too.

    An override is documented where it was declared, an overload by its implementation, a setter by its property.
    """
    missing: list[str] = []
    for node in body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node) and not has_decorator(node, "override", "overload", "setter"):
            missing.append(f"{prefix}{node.name}")
        if isinstance(node, ast.ClassDef):
            missing += undocumented(node.body, f"{prefix}{node.name}.")
    return missing


def test_every_public_name_is_documented():
    missing: list[str] = []
    for file in PACKAGE_FILES:
        if file.text and not ast.get_docstring(file.tree):
            missing.append(f"{file.name}: the module")
        missing += undocumented(file.tree.body, f"{file.name}: ")
    assert not missing, f"without docstring:{listed(missing)}"


def nodes_of(kind: type[ast.AST]) -> list[str]:
    """Places in the packages where a statement of this kind stands."""
    return [
        f"{file.name}:{node.lineno}" for file in PACKAGE_FILES for node in ast.walk(file.tree) if type(node) is kind
    ]


def test_asserts_are_few():
    asserts = nodes_of(ast.Assert)
    allowed = max(1, sum(len(file.lines) for file in PACKAGE_FILES) // LINES_PER_ASSERT)
    assert len(asserts) <= allowed, f"raise a real error instead, only {allowed} may stay:{listed(asserts)}"


def test_nothing_is_global():
    statements = nodes_of(ast.Global)
    assert not statements, f"pass the value instead:{listed(statements)}"


def test_attributes_are_not_reached_by_string():
    """Where introspection is the feature, the line ends in `# introspection: <why>`."""
    calls = [
        f"{file.name}:{node.lineno} {node.func.id}"
        for file in PACKAGE_FILES
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in STRING_ACCESS
        and "# introspection: " not in file.lines[node.lineno - 1]
    ]
    assert not calls, f"use a Protocol, isinstance or a typed attribute, or say `# introspection: why`:{listed(calls)}"


def test_open_ends_name_their_issue():
    words = "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X"))
    open_end = re.compile(rf"\b({words})\b(?! ?\(#\d+\))")
    found = [
        f"{file.name}:{number} {line.strip()}"
        for file in python_files("d9d", "d9d_lightning", "examples", "tests", "docs")
        for number, line in enumerate(file.lines, start=1)
        if open_end.search(line)
    ]
    assert not found, f"write the issue behind it, as in (#12):{listed(found)}"


def num_comment_lines(file: SourceFile) -> int:
    return sum(line.lstrip().startswith("#") for line in file.lines)


def test_comments_do_not_crowd_the_code():
    num_lines = sum(len(file.lines) for file in PACKAGE_FILES)
    share = sum(num_comment_lines(file) for file in PACKAGE_FILES) / num_lines
    assert share <= MAX_COMMENT_SHARE, f"{share:.0%} of all lines are comments"
