"""The pages can be built: their links lead somewhere and their examples hold."""

import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.repo.source_tree import ROOT

ON_TWO_RANKS = re.compile(r"<!-- run on 2 ranks -->\n+```python\n(.*?)```", re.DOTALL)


def test_docs_build(tmp_path: Path):
    command = [sys.executable, str(ROOT / "docs" / "build.py"), str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}  # the checkout, whether or not it is installed
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "index.html").is_file()


@pytest.mark.world_size(2)
def test_the_pipeline_page_runs_its_own_schedule():
    page = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")
    [block] = ON_TWO_RANKS.findall(page)
    names: dict[str, Any] = {"__name__": "page"}
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        # The block goes on from the examples above it.
        for example in doctest.DocTestParser().get_examples(page):
            exec(example.source, names)
        exec(block, names)
    assert re.search(r"rank [01]: \d+\.\d{3}$", output.getvalue().strip())
