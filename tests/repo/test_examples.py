"""The examples and the commands in the README run as they are written."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.repo.source_tree import ROOT

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 110  # for a busy machine; on two idle cores an example takes less than 60 s

# Example folder -> the command that its README documents and what it has to print.
COMMANDS = {
    "digits": ("python examples/digits/train.py", r"test accuracy: 0\.9[5-9]"),
    "quickstart": ("python examples/quickstart/train.py examples/quickstart/config.yaml", r"step 150/150 \| loss 0\.0"),
}

DOCUMENTED = {command for command, _ in COMMANDS.values()}
MARKED_COMMANDS = re.compile(r"<!-- run -->\n+```bash\n(.*?)```", re.DOTALL)


def marked_commands(document: Path) -> list[str]:
    """Commands of the `bash` blocks below a `<!-- run -->` mark, one a line."""
    blocks = MARKED_COMMANDS.findall(document.read_text(encoding="utf-8"))
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


def run_in(folder: Path, command: str) -> str:
    """Run a command as someone in the repository would, but let it write into `folder`."""
    (folder / "examples").symlink_to(EXAMPLES)
    own_tools = Path(sys.executable).parent
    env = os.environ | {
        "PATH": f"{own_tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),  # the checkout, whether or not it is installed
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        timeout=TIMEOUT_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"`{command}` ended with {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout


def test_every_example_is_in_the_table():
    assert sorted(COMMANDS) == sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_readme_of_an_example_documents_its_command(name: str):
    command, _ = COMMANDS[name]
    assert command in (EXAMPLES / name / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_example_runs(name: str, tmp_path: Path):
    command, expected = COMMANDS[name]
    output = run_in(tmp_path, command)
    assert re.search(expected, output), f"`{command}` did not print {expected}:\n{output[-4000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in marked_commands(ROOT / "README.md") if c not in DOCUMENTED])
def test_readme_command_runs(command: str, tmp_path: Path):
    run_in(tmp_path, command)


def test_quickstart_configs_differ_in_mesh_and_run_name_only():
    plain, sharded = (
        yaml.safe_load((EXAMPLES / "quickstart" / name).read_text(encoding="utf-8"))
        for name in ("config.yaml", "sharded.yaml")
    )
    assert plain.pop("mesh") != sharded.pop("mesh")
    assert plain["trainer"].pop("run") != sharded["trainer"].pop("run")
    assert plain == sharded
