"""`docs/map.md` names real files, and every file of some size."""

import re

from tests.repo.source_tree import PACKAGE_FILES, PACKAGES, ROOT, listed

MIN_LINES_TO_BE_NAMED = 40
MAP = ROOT / "docs" / "map.md"

QUOTED = re.compile(r"`([\w./-]+)`")


def named_paths() -> set[str]:
    """What the map writes in backticks and has a slash: a file or a folder."""
    return {name for name in QUOTED.findall(MAP.read_text(encoding="utf-8")) if "/" in name}


def test_every_path_of_the_map_exists():
    missing = [name for name in sorted(named_paths()) if not (ROOT / name).exists()]
    assert not missing, f"docs/map.md names what is not there:{listed(missing)}"


def test_the_map_names_every_larger_file():
    named = named_paths()
    code = [file for file in PACKAGE_FILES if file.path.name != "__init__.py"]
    left_out = [f.name for f in code if len(f.lines) >= MIN_LINES_TO_BE_NAMED and f.name not in named]
    assert not left_out, f"add to docs/map.md ({', '.join(PACKAGES)}):{listed(left_out)}"
