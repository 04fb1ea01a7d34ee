"""Runs pytest with the harness in a process of its own, on a test file made for the purpose."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_REPOSITORY = Path(__file__).parents[2]
# A shell starts its background jobs with SIGINT ignored, and so would pytest be: tests send it one.
_MAIN = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(pytest.main(sys.argv[1:]))
"""
_SECTION = re.compile(r"^_{3,} (test_\w+) _{3,}$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PytestReport:
    """What pytest printed: all of it, and the part on each test that failed."""

    text: str
    failures: dict[str, str]


def start_pytest(directory: Path, source: str, *options: str) -> subprocess.Popen[str]:
    """Write a test file into a directory and start pytest on it."""
    (directory / "test_sample.py").write_text(source)
    return subprocess.Popen(
        [sys.executable, "-c", _MAIN, "-p", "tests.harness.plugin", "-p", "no:cacheprovider", *options, "."],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(_REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def read_report(process: subprocess.Popen[str]) -> PytestReport:
    """Wait for pytest's end and split what it printed by test."""
    text, _ = process.communicate(timeout=90)
    body, _, _ = text.partition("short test summary info")
    parts = _SECTION.split(body)
    return PytestReport(text, dict(zip(parts[1::2], parts[2::2], strict=True)))
