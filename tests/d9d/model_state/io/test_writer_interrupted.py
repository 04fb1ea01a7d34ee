"""Exports that are killed at each of their steps never leave what looks complete and is not."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from d9d.model_state.io.source import open_model_state
from d9d.model_state.io.writer import write_model_state_local
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import ModelStateMapperIdentity

ROOT = Path(__file__).parents[4]
TENSOR_GB = 24 / 1e9

CASES = [
    (0, 1, False),
    (0, 2, True),
    (1, 1, False),
    (1, 1, True),
    (1, 2, False),
    (3, 1, True),
    (3, 2, False),
    (2, 2, True),
]
"""Files of an older export, 0 for none, and of the one that is killed; whether they have manifests."""


@pytest.mark.slow
@pytest.mark.timeout_s(120)
def test_killed_exports(tmp_path: Path):
    # A process of its own: killed copies of one with the threads of the tests would be no fair trial.
    script = f"import runpy; runpy.run_path({__file__!r})['kill_exports']({str(tmp_path)!r})"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment, timeout=100
    )
    assert done.returncode == 0, done.stderr
    for name, found in json.loads(done.stdout).items():
        old, new, manifest = json.loads(name)
        # One state follows the other: what was there, nothing that can be taken for weights, the new weights.
        states = [state for state, _ in itertools.groupby(found)]
        first = "old" if old else "nothing"
        # A single file takes the place of one; with a manifest, neither fits for a moment.
        at_once = new == 1 and (not old or (old == 1 and not manifest))
        assert states == ([first, "new"] if at_once or not old else [first, "nothing", "new"]), (name, found)
        # Each file is flushed and renamed, and the directory flushed.
        assert len(found) > 2 * new + 1


def kill_exports(directory: str) -> None:
    """Print what is there after an export that was killed before its first step, its second, and so on."""
    torch.set_num_threads(1)
    found: dict[str, list[str]] = {}
    for old, new, manifest in CASES:
        states = found.setdefault(json.dumps([old, new, manifest]), [])
        for step in itertools.count():
            target = Path(directory) / f"{old}-{new}-{manifest}-{step}"
            if old:
                export(target, old, "old", manifest)
            status = in_child(lambda: killed_export(target, new, manifest, step))  # noqa: B023  # called at once
            states.append(what_is_there(target, {"old": old, "new": new}))
            if status == 0:
                break
            if step % 4 == 2:
                # The next export is not disturbed by what is left.
                export(target, 2, "next", manifest)
                assert what_is_there(target, {"next": 2}) == "next"
                assert not list(target.glob(".tmp*"))
    sys.stdout.write(json.dumps(found))


def in_child(action: Any) -> int:
    """Run an action in a copy of this process; return the number of the signal that killed it, or 0."""
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def killed_export(directory: Path, num_files: int, manifest: bool, last_step: int) -> None:
    """Export, and be killed before one of the steps that change what is on disk."""
    steps = itertools.count()

    def step() -> None:
        if next(steps) == last_step:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            step()
            return function(*args, **kwargs)

        return count

    for name in ("fsync", "replace", "rename", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    export(directory, num_files, "new", manifest, before_each=step)


def export(directory: Path, num_files: int, label: str, manifest: bool, before_each: Any = lambda: None) -> None:
    """Export as many tensors as files, which tell who wrote them."""

    def state() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in expected_tensors(num_files, label).items():
            before_each()
            yield name, tensor

    mapper = ModelStateMapperParallel([ModelStateMapperIdentity(f"t{n}") for n in range(num_files)])
    write_model_state_local(directory, mapper, state(), TENSOR_GB, show_progress=False, manifest=manifest)


def expected_tensors(num_files: int, label: str) -> dict[str, torch.Tensor]:
    return {
        f"t{n}": torch.full((6,), 1000 * len(label) + ord(label[0]) + n, dtype=torch.int32) for n in range(num_files)
    }


def what_is_there(directory: Path, exports: dict[str, int]) -> str:
    """Which export is in a directory, as whoever opens it sees it."""
    try:
        with open_model_state(directory) as source:
            tensors = {name: source.read(name).clone() for name in source.tensors}
    except (ValueError, FileNotFoundError):
        return "nothing"
    for label, num_files in exports.items():
        expected = expected_tensors(num_files, label)
        if tensors.keys() == expected.keys() and all(torch.equal(tensors[name], expected[name]) for name in tensors):
            return label
    return f"a mixture: {tensors}"
