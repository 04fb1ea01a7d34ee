"""The command line for model states: what it writes and prints, what it refuses, and its exit status."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from d9d.cli import main
from d9d.model_state.convert import DTYPES

MAPPERS = """
import os
import time
from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import ModelStateMapperConcatenateTensors, ModelStateMapperRename

def fused():
    return ModelStateMapperParallel(
        [ModelStateMapperConcatenateTensors(["q", "k"], "qk", dim=0), ModelStateMapperRename("o", "out")]
    )

def misspelt():
    return ModelStateMapperParallel([ModelStateMapperRename("embde", "a"), ModelStateMapperRename("oo", "b")])

class Slow(ModelStateMapper):
    def __init__(self, name):
        self.name = name
    def state_dependency_groups(self):
        return frozenset([StateGroup(inputs=frozenset([self.name]), outputs=frozenset([self.name]))])
    def apply(self, group):
        if any(tensor.is_meta for tensor in group.values()):
            return group  # it is tried without data first
        os.write(1, b"working\\n")  # at once, as several do it
        time.sleep(100)

def slow(names):
    return ModelStateMapperParallel([Slow(name) for name in names])
"""

ROOT = Path(__file__).resolve().parents[2]
TENSORS = {"q": torch.arange(6.0).view(2, 3), "k": torch.ones(4, 3), "o": torch.zeros(3, 2), "embed": torch.ones(5)}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a model state in ``src`` and a module of mappers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cli_mappers", raising=False)
    (tmp_path / "src").mkdir()
    save_file(TENSORS, tmp_path / "src" / "model.safetensors")
    (tmp_path / "cli_mappers.py").write_text(MAPPERS, encoding="utf-8")
    return tmp_path


def refusal(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(command.split())
    assert caught.value.code == 2
    assert not Path("dst").exists()
    return capsys.readouterr().err


def test_convert_writes_what_the_mapper_makes(folder: Path, capsys: pytest.CaptureFixture[str]):
    command = "convert src dst --mapper cli_mappers:fused --dtype bf16 --shard-size 1KB --manifest"
    assert main(command.split()) == 0
    found = load_file(folder / "dst" / "model.safetensors")
    expected = {"qk": torch.cat([TENSORS["q"], TENSORS["k"]]).bfloat16(), "out": TENSORS["o"].bfloat16()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (folder / "dst" / "model.sha256.json").is_file()
    # (6 x 3 + 3 x 2) numbers of 2 bytes
    assert capsys.readouterr().out == "dst: 2 tensors, 48 B, in 1 file\nnot read from the source: 1 tensor: 'embed'\n"


@pytest.mark.parametrize(
    ("size", "num_files"), [("60B", None), ("0.05KB", 3), ("0.1kb", 2), ("0.125KiB", 1), ("1 GB", 1), ("0GB", None)]
)
def test_shard_sizes_have_units(folder: Path, size: str, num_files: int | None, capsys: pytest.CaptureFixture[str]):
    # 24 (q) + 48 (k) + 24 (o) + 20 (embed) = 116 bytes
    command = ["convert", "src", "dst", "--shard-size", size]
    if num_files is None:
        with pytest.raises(SystemExit):
            main(command)
        assert f"'{size}' is no size above 0 with a unit, such as 500MB or 4GB" in capsys.readouterr().err
        return
    main(command)
    assert len(list((folder / "dst").glob("*.safetensors"))) == num_files


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("convert src", ["the following arguments are required: DST"]),
        ("convert src dst --dtype bf61", ["invalid choice: 'bf61'", "Did you mean 'bf16'?"]),
        ("convert src dst --shard-size 4", ["'4' is no size above 0 with a unit"]),
        ("convert nowhere dst", ["no model state at nowhere"]),
        ("convert src src", ["src is the source itself"]),
        ("convert src dst --workers 0", ["workers (0) must be at least 1"]),
        ("convert src dst --mapper cli_maper:fused", ["no module cli_maper", "did you mean cli_mappers?"]),
        ("convert src dst --mapper cli_mappers:fussed", ["cli_mappers:fussed is not there: did you mean fused?"]),
        ("convert src dst --mapper cli_mappers:misspelt", ["'embde'", "'embed'", "'oo'"]),
        ("inspect nowhere", ["no model state at nowhere"]),
        ("inspect src --names zzz", ["no tensor of src fits --names 'zzz'"]),
        ("inspect src --mapper cli_mappers", ["must have the form pkg.module:function"]),
    ],
)
def test_wrong_words_are_refused(command: str, words: list[str], capsys: pytest.CaptureFixture[str]):
    message = refusal(command, capsys)
    assert all(word in message for word in words), message
    assert "Traceback" not in message
    assert f"python -m d9d {command.split(maxsplit=1)[0]}: error: " in message


def test_help_names_all_dtypes(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    assert f"{{{','.join(DTYPES)}}}" in capsys.readouterr().out


def test_a_failed_conversion_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]):
    save_file({"large": torch.full((2,), 1e30)}, folder / "src" / "model.safetensors")
    with pytest.raises(SystemExit) as caught:
        main(["convert", "src", "dst", "--dtype", "fp16"])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("python -m d9d convert: error: the conversion to dst was not completed: large has values")
    assert message.count("\n") == 1


def test_inspect_shows_tensors_and_succeeds(capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", "src", "--names", "[qk]"]) == 0
    assert capsys.readouterr().out == (
        "src: 2 of 4 tensors\n\n"
        "file               tensors  size\n"
        "model.safetensors        2  72 B\n\n"
        "tensor  dtype    shape   size  file\n"
        "k       float32  (4, 3)  48 B  model.safetensors\n"
        "q       float32  (2, 3)  24 B  model.safetensors\n\n"
        "dtype    tensors  parameters  size\n"
        "float32        2          18  72 B\n\n"
        "no problems\n"
    )


def test_inspect_fails_where_something_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "src" / ".tmp-rank0-shard-0.safetensors").touch()
    assert main(["inspect", "src"]) == 1
    assert "1 problem:\n  src holds what an export has left" in capsys.readouterr().out


def test_inspect_shows_what_a_mapper_makes(capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", "src", "--mapper", "cli_mappers:fused"]) == 0
    shown = capsys.readouterr().out
    assert "qk     float32  (6, 3)  72 B" in shown
    assert shown.endswith("not read: 1 tensor: 'embed'\n\nthe mapper fits\n")
    assert main(["inspect", "src", "--mapper", "cli_mappers:misspelt"]) == 1
    shown = capsys.readouterr().out
    assert "no problems" in shown
    assert "the mapper does not fit:\n" in shown


def run_module(*words: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{RUN}", *words]


# A suite that runs in the background of a script ignores interrupts, and so would its children.
RUN = """import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[0] = 'd9d'
runpy.run_module('d9d', run_name='__main__', alter_sys=True)"""


@pytest.mark.timeout_s(120)
def test_a_reader_that_has_enough_is_no_error(folder: Path):
    names = {f"{number:05d}": torch.zeros(1) for number in range(5000)}  # more than a pipe holds
    save_file(names, folder / "src" / "model.safetensors")
    command = subprocess.Popen(run_module("inspect", "src"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert command.stdout is not None
    assert command.stdout.readline() == "src: 5000 tensors\n"
    command.stdout.close()
    assert command.wait(timeout=100) == 0
    assert command.stderr is not None
    assert command.stderr.read() == ""


@pytest.mark.timeout_s(120)
@pytest.mark.parametrize("num_workers", ["1", "2"])
def test_an_interrupted_conversion_ends_its_workers_and_leaves_nothing(folder: Path, num_workers: str):
    command = subprocess.Popen(
        run_module("convert", "src", "dst", "--mapper", "cli_mappers:slow", "--workers", num_workers),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
        start_new_session=True,
    )
    assert command.stdout is not None
    for _ in range(int(num_workers)):
        assert command.stdout.readline() == "working\n"
    os.killpg(command.pid, signal.SIGINT)  # as a terminal does
    _, errors = command.communicate(timeout=100)
    assert command.returncode == 130
    assert errors.splitlines()[-1] == "python -m d9d convert: error: interrupted; what is in dst is not complete."
    assert "Traceback" not in errors
    assert not list((folder / "dst").glob("*"))
    wait_until_gone(command.pid)


def wait_until_gone(group: int) -> None:
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a worker has outlived its parent")
