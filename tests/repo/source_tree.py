"""The repository's files, as the tests of this folder see them."""

import ast
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("d9d", "d9d_lightning")


@dataclass(frozen=True)
class SourceFile:
    """One Python file, read and parsed once."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.name)


@dataclass(frozen=True)
class Function:
    """One function or method and the names of what it is nested in, outermost first."""

    file: SourceFile
    node: ast.FunctionDef | ast.AsyncFunctionDef
    scopes: tuple[str, ...]
    is_method: bool

    @property
    def where(self) -> str:
        return f"{self.file.name}:{self.node.lineno} {'.'.join((*self.scopes, self.node.name))}"

    @property
    def num_lines(self) -> int:
        """Lines from `def` to the end, without the docstring: words cost a reader nothing that code does."""
        end = self.node.end_lineno or self.node.lineno
        return end - self.node.lineno + 1 - num_docstring_lines(self.node)


def num_docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(node, clean=False) is None:
        return 0
    docstring = node.body[0]
    return (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1


def tracked_files() -> list[Path]:
    """Every file that git knows or would add."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    paths = (ROOT / name for name in sorted(set(listing.split("\0"))) if name)
    return [path for path in paths if path.is_file()]


TRACKED = tracked_files()


def python_files(*folders: str) -> list[SourceFile]:
    tops = [ROOT / folder for folder in folders]
    paths = (path for path in TRACKED if path.suffix == ".py" and any(path.is_relative_to(top) for top in tops))
    return [SourceFile(path) for path in paths]


PACKAGE_FILES = python_files(*PACKAGES)


def functions_of(file: SourceFile) -> list[Function]:
    found: list[Function] = []

    def visit(node: ast.AST, scopes: tuple[str, ...], in_class: bool) -> None:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    found.append(Function(file, child, scopes, in_class))
                    visit(child, (*scopes, child.name), False)
                case ast.ClassDef():
                    visit(child, (*scopes, child.name), True)
                case _:
                    visit(child, scopes, in_class)

    visit(file.tree, (), False)
    return found


PACKAGE_FUNCTIONS = [function for file in PACKAGE_FILES for function in functions_of(file)]


def listed(problems: list[str]) -> str:
    """Join problems into one assertion message."""
    return "\n  " + "\n  ".join(problems)
