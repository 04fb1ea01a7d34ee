"""Imports test modules in a rank as pytest would: same module name, rewritten asserts."""

import importlib
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import pytest
from _pytest.assertion import util as assertion_util
from _pytest.config import _prepareconfig
from _pytest.pathlib import import_path

from tests.harness.messages import TestSource

_MAX_EXPLANATION_LINES = 60


def install_assertion_rewriting(pytest_args: Sequence[str]) -> None:
    """Install pytest's import hook, and its explanations of comparisons, in a process that runs no pytest.

    Preparing a config installs the hook; nothing is collected or configured. pytest offers no public call for it.
    """
    config = _prepareconfig(list(pytest_args))
    assertion_util._reprcompare = _comparison_explainer(config)
    assertion_util._config = config


def _comparison_explainer(config: pytest.Config) -> Callable[[str, object, object], str | None]:
    def explain(op: str, left: object, right: object) -> str | None:
        explanations = config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right)
        for explanation in explanations:
            lines = list(islice(explanation or (), _MAX_EXPLANATION_LINES))
            if lines:
                # The format that rewritten asserts expect: "~" continues, "%" is doubled.
                return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        return None

    return explain


def import_test(source: TestSource) -> Callable[..., object]:
    """Import the module of a test and return the test function."""
    # Directories made since the last look may have been cached as empty.
    importlib.invalidate_caches()
    module = import_path(
        Path(source.path),
        mode=source.import_mode,
        root=Path(source.root),
        consider_namespace_packages=source.consider_namespace_packages,
    )
    return getattr(module, source.function)
