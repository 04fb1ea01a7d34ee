"""The pages can be built: their links lead somewhere and their examples hold."""

import subprocess
import sys
from pathlib import Path

from tests.repo.source_tree import ROOT


def test_docs_build(tmp_path: Path):
    command = [sys.executable, str(ROOT / "docs" / "build.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").is_file()
