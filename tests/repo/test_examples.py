"""The examples and the commands in the README run as they are written."""

import json
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

FP32_AFTER_STEPS = 1e-5  # sums in another order, through a dozen updates: 1e-7 is usual

# Example folder -> the command that its README documents and what it has to print.
COMMANDS = {
    "digits": ("python examples/digits/train.py", r"test accuracy: 0\.9[5-9]"),
    "pipeline": (
        "torchrun --nproc-per-node 4 examples/pipeline/train.py examples/pipeline/config.yaml",
        r"step 80/80 \| loss 0\.[67]",
    ),
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
    if not (folder / "examples").exists():
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


def test_pipeline_configs_differ_in_mesh_run_name_and_timeline_only():
    pipelined, single = (
        yaml.safe_load((EXAMPLES / "pipeline" / name).read_text(encoding="utf-8"))
        for name in ("config.yaml", "single.yaml")
    )
    assert pipelined.pop("mesh") != single.pop("mesh")
    assert pipelined["trainer"].pop("run") != single["trainer"].pop("run")
    assert pipelined["trainer"]["pipelining"].pop("timeline")
    assert pipelined == single


@pytest.mark.slow
def test_the_pipeline_example_has_the_losses_of_one_process(tmp_path: Path):
    configs = {
        "torchrun --nproc-per-node 4": ("config.yaml", {"schedule": "zero_bubble_v"}),
        "python": ("single.yaml", {"schedule": "gpipe"}),
    }
    for launcher, (name, schedule) in configs.items():
        config = yaml.safe_load((EXAMPLES / "pipeline" / name).read_text(encoding="utf-8"))
        config["trainer"]["schedule"]["total_steps"] = 12
        config["trainer"]["pipelining"]["schedule"] = schedule
        config["trainer"]["logging"]["period_steps"] = 1
        (tmp_path / name).write_text(yaml.safe_dump(config), encoding="utf-8")
        run_in(tmp_path, f"{launcher} examples/pipeline/train.py {name}")
    losses: dict[str, list[float]] = {"pipeline": [], "pipeline-single": []}
    for line in (tmp_path / "runs" / "pipeline.jsonl").read_text(encoding="utf-8").splitlines():
        point = json.loads(line)
        if point["name"] == "loss":
            losses[point["run"]].append(point["value"])
    assert len(losses["pipeline"]) == 12
    assert losses["pipeline"] == pytest.approx(losses["pipeline-single"], rel=FP32_AFTER_STEPS)
    assert (tmp_path / "runs" / "pipeline-timeline.svg").read_text(encoding="utf-8").startswith("<svg")
