"""What people are told of checkpoints."""

import logging
import re
from pathlib import Path

import numpy as np
import torch

from d9d.checkpoint import CheckpointFolder, CheckpointPath, CheckpointSaver
from d9d.checkpoint.inspection import describe_checkpoint, differences, list_checkpoints, verify_folder
from d9d.core.participants import Participants


def save(folder: Path, step: int, weight: torch.Tensor, **values: object) -> Path:
    saver = CheckpointSaver(CheckpointFolder(folder, logging.getLogger("test")), Participants())
    saver.save({"model": {"weight": weight}, "task": values}, step)
    return folder / f"save-{step}"


def test_a_folder(tmp_path: Path):
    for step in (9, 10):
        save(tmp_path, step, torch.zeros(250))
    (tmp_path / "save-11.partial").mkdir()
    first, second, third = list_checkpoints(tmp_path)
    assert re.fullmatch(r"save-9 +step +9 +[3-5]\.\d+ kB +1 ranks +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", first)
    assert second.startswith("save-10 ")
    assert third.split() == ["save-11.partial", "no", "complete", "checkpoint"]


def test_verification(tmp_path: Path):
    intact = save(tmp_path, 1, torch.zeros(2))
    damaged = save(tmp_path, 2, torch.zeros(2))
    (damaged / "__0_0.distcp").write_bytes(b"")
    found = dict(verify_folder(tmp_path))
    assert found[intact] == []
    assert "has 0 bytes" in found[damaged][0]
    assert list(verify_folder(damaged)) == [(damaged, found[damaged])]


def test_checkpoints_of_other_names(tmp_path: Path):
    """As callbacks of Lightning choose them, also for links to the newest."""
    paths = [tmp_path / name for name in ("epoch=1-step=20.ckpt", "epoch=0-step=3.ckpt")]
    for path, step in zip(paths, (20, 3), strict=True):
        saver = CheckpointSaver(CheckpointPath(path, logging.getLogger("test")), Participants())
        saver.save({"weight": torch.zeros(2)}, step)
    link = tmp_path / "last.ckpt"
    link.symlink_to(paths[0])
    (tmp_path / "data").mkdir()
    assert [line.split(" step ")[0].strip() for line in list_checkpoints(tmp_path)] == [paths[1].name, paths[0].name]
    (paths[1] / "__0_0.distcp").write_bytes(b"")
    found = dict(verify_folder(tmp_path))
    assert list(found) == paths[::-1]
    assert found[paths[0]] == []
    assert "has 0 bytes" in found[paths[1]][0]
    assert list(verify_folder(paths[1])) == [(paths[1], found[paths[1]])]
    assert list(verify_folder(link)) == [(link, [])]
    assert describe_checkpoint(link) == ["weight  float32 [2]  8 B"]


def test_content(tmp_path: Path):
    path = save(tmp_path, 1, torch.zeros(2, 3, dtype=torch.bfloat16), lr=0.5, text="x" * 100)
    lines = describe_checkpoint(path)
    assert lines[0] == "model.weight  bfloat16 [2, 3]  12 B"
    assert lines[1] == "task.lr  = 0.5"
    assert lines[2].startswith("task.text  = 'xxx")
    assert lines[2].endswith("x...")
    assert describe_checkpoint(path, "task.l*") == ["task.lr  = 0.5"]


def test_two(tmp_path: Path):
    weight = torch.arange(4.0)
    first = save(tmp_path / "a", 1, weight, lr=0.5, steps=1)
    assert list(differences(first, save(tmp_path / "b", 7, weight.clone(), lr=0.5, steps=1))) == []
    changed = weight.clone()
    changed[1:3] += torch.tensor([0.25, -2])
    second = save(tmp_path / "c", 1, changed, lr=0.25, other=1)
    assert {found.name: found.text for found in differences(first, second)} == {
        "model.weight": "2 of 4 elements differ, by up to 2",
        "task.lr": "0.5 and 0.25",
        "task.other": f"only in {second}",
        "task.steps": f"only in {first}",
    }
    third = save(tmp_path / "d", 1, torch.zeros(5), lr=0.5, steps=1)
    (found,) = differences(first, third)
    assert found.text == "torch.float32 [4] and torch.float32 [5]"


def test_nothing_is_rounded_away(tmp_path: Path):
    nan = torch.tensor([1.0, torch.nan])
    first = save(tmp_path / "a", 1, torch.tensor([2**60, 5]), seen=np.arange(5000), nan=1)
    second = save(
        tmp_path / "b",
        1,
        torch.tensor([2**60 + 1, 5]),
        seen=np.where(np.arange(5000) == 2500, 0, np.arange(5000)),
        nan=1,
    )
    found = {difference.name: difference.text for difference in differences(first, second)}
    assert found["model.weight"] == "1 of 2 elements differ"
    assert sorted(found) == ["model.weight", "task.seen"]
    third, fourth = save(tmp_path / "c", 1, nan), save(tmp_path / "d", 1, nan + torch.tensor([1.0, 0.0]))
    assert [difference.text for difference in differences(third, fourth)] == ["1 of 2 elements differ, by up to 1"]
