"""Rules on what source text may hold: accelerators, serialization, paths, package files, imports."""

import ast
import re
from collections.abc import Iterator

import grimp
import pytest

from tests.repo.source_tree import PACKAGE_FILES, PACKAGES, ROOT, TRACKED, SourceFile, listed, python_files

ACCELERATOR = re.compile(r"""torch\.cuda|"cuda|'cuda|\.cuda\(""")
MAY_NAME_ACCELERATORS = ("d9d/core/device.py", "d9d/kernel/")

# The brackets keep this line from matching itself.
MACHINE_PATH = re.compile(r"/wor[k]/|/far[m]/|/tmp/bash[_]jobs|(?<!\w)\.librar[y]")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".cfg", ".json", ".sh", ""}

PICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve"}

# The two places where a package's __init__ does more than re-export: they refuse a broken installation.
INIT_WITH_LOGIC = {"d9d/__init__.py", "d9d_lightning/__init__.py"}

# (importer, imported, exceptions): import-linter would refuse rules on modules that are still to come.
FORBIDDEN_IMPORTS = [
    ("d9d.loop", "d9d.module.block", ()),
    ("d9d.loop", "d9d.module.model", ()),
    ("d9d.module", "d9d.pipelining", ("d9d.pipelining.api",)),
    ("d9d.pipelining.actions", "torch", ()),
    ("d9d.pipelining.programs", "torch", ()),
    ("d9d.pipelining.programs_v", "torch", ()),
    ("d9d.pipelining.placement", "torch", ()),
    ("d9d.pipelining.communications", "torch", ()),
    ("d9d.pipelining.timeline", "torch", ()),
    ("d9d.pipelining.validate", "torch", ()),
]


def lines_matching(pattern: re.Pattern[str], files: list[SourceFile]) -> list[str]:
    return [
        f"{file.name}:{number} {line.strip()}"
        for file in files
        for number, line in enumerate(file.lines, start=1)
        if pattern.search(line)
    ]


def test_only_device_and_kernels_name_an_accelerator():
    files = [file for file in PACKAGE_FILES if not file.name.startswith(MAY_NAME_ACCELERATORS)]
    found = lines_matching(ACCELERATOR, files)
    assert not found, f"ask d9d.core.device instead:{listed(found)}"


def test_no_path_of_one_machine():
    texts = [SourceFile(path) for path in TRACKED if path.suffix in TEXT_SUFFIXES]
    found = lines_matching(MACHINE_PATH, texts)
    assert not found, f"these paths exist on one machine only:{listed(found)}"


def imported_modules(file: SourceFile) -> Iterator[tuple[int, str]]:
    for node in ast.walk(file.tree):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                yield node.lineno, module
            case _:
                pass


def test_nothing_is_pickled():
    found = [
        f"{file.name}:{line} {module}"
        for file in python_files(*PACKAGES, "examples")
        for line, module in imported_modules(file)
        if module.split(".")[0] in PICKLERS
    ]
    assert not found, f"a pickle runs code when it is read; use safetensors, DCP or JSON:{listed(found)}"


LOAD = re.compile(r"\btorch\.load\b")


def is_unsafe_load(call: ast.Call) -> bool:
    if ast.unparse(call.func) != "torch.load":
        return False
    safe = [k for k in call.keywords if k.arg == "weights_only" and ast.unparse(k.value) == "True"]
    return not safe


def test_torch_load_reads_weights_only():
    found = [
        f"{file.name}:{node.lineno}"
        for file in python_files(*PACKAGES, "examples", "tests")
        if LOAD.search(file.text)  # to parse them all takes seconds
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Call) and is_unsafe_load(node)
    ]
    assert not found, f"pass weights_only=True:{listed(found)}"


def is_reexport(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.AnnAssign(target=ast.Name(id="__all__")):
            return True
        case _:
            return False


def test_init_files_only_reexport():
    found = [
        f"{file.name}:{statement.lineno}"
        for file in PACKAGE_FILES
        if file.path.name == "__init__.py" and file.name not in INIT_WITH_LOGIC
        for statement in file.tree.body
        if not is_reexport(statement)
    ]
    assert not found, f"move this code into a module:{listed(found)}"


def test_every_package_folder_has_an_init_file():
    folders = {file.path.parent for file in PACKAGE_FILES}
    missing = [f.relative_to(ROOT).as_posix() for f in sorted(folders) if not (f / "__init__.py").is_file()]
    assert not missing, f"without __init__.py, tools and installers skip:{listed(missing)}"


@pytest.fixture(scope="module")
def import_graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


@pytest.mark.parametrize(("importer", "imported", "exceptions"), FORBIDDEN_IMPORTS)
def test_forbidden_imports(import_graph: grimp.ImportGraph, importer: str, imported: str, exceptions: tuple[str, ...]):
    within = [module for module in import_graph.modules if f"{module}.".startswith(f"{importer}.")]
    found = [
        f"{source} imports {target}"
        for source in sorted(within)
        for target in sorted(import_graph.find_modules_directly_imported_by(source))
        if f"{target}.".startswith(f"{imported}.") and target not in exceptions
    ]
    assert not found, f"not allowed:{listed(found)}"
