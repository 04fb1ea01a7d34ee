"""`python -m d9d checkpoint`."""

import logging
from pathlib import Path

import pytest
import torch

from d9d.checkpoint import CheckpointFolder, CheckpointSaver
from d9d.cli import main
from d9d.core.participants import Participants


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saver = CheckpointSaver(CheckpointFolder(tmp_path, logging.getLogger("test")), Participants())
    for step in (1, 2):
        saver.save({"model": {"weight": torch.full((2,), float(step))}, "lr": 0.5}, step)
    return tmp_path


def test_commands(folder: Path, capsys: pytest.CaptureFixture[str]):
    first, second = folder / "save-1", folder / "save-2"
    assert main(["checkpoint", "list", str(folder)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["save-1", "save-2"]
    assert main(["checkpoint", "show", str(second), "--names", "model*"]) == 0
    assert capsys.readouterr().out == "model.weight  float32 [2]  8 B\n"
    assert main(["checkpoint", "diff", str(first), str(first)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    assert main(["checkpoint", "diff", str(first), str(second)]) == 1
    assert capsys.readouterr().out == "model.weight: 2 of 2 elements differ, by up to 1\n"
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert capsys.readouterr().out == f"{first}: intact\n{second}: intact\n"
    for wrong in (folder, folder / "save-7"):
        with pytest.raises(SystemExit):
            main(["checkpoint", "show", str(wrong)])
        assert f"{wrong} is no complete checkpoint. There are {first}, {second}." in capsys.readouterr().err
    (first / "tensors.json").unlink()
    assert main(["checkpoint", "verify", str(folder)]) == 1
    assert capsys.readouterr().out.splitlines()[:2] == [f"{first}: damaged", f"  {first / 'tensors.json'} is missing"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("list", "nowhere"), "there is no folder nowhere"),
        (("show", "."), "is no complete checkpoint. Name one, such as runs/checkpoints/job/save-100"),
        (("verify", "nowhere"), "holds no complete checkpoint"),
        (("diff", "a"), "diff takes two checkpoints"),
        (("list", "a", "b"), "list takes one folder"),
    ],
)
def test_what_is_wrong_is_told(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["checkpoint", *words])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
