"""What each tracker writes, read back from its file, and what happens without the package behind it."""

import json
import logging
import sys

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from d9d.tracker import AnyTrackerConfig, Histogram, RunConfig, Scalar, TrackerPoint, tracker_from_config
from d9d.tracker.base import flat_name

CONFIG = TypeAdapter(AnyTrackerConfig)
LOSS = TrackerPoint(name="loss", step=3, context={"split": "train"})


def build(**fields):
    return tracker_from_config(CONFIG.validate_python(fields))


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_null_reads_nothing():
    tracker = build(provider="null")
    with tracker.open(RunConfig(name="run")) as run:
        run.write(LOSS, Scalar(torch.zeros((), device="meta")))
    assert tracker.state_dict() == {}


def test_log_writes_a_line_per_value(caplog):
    with caplog.at_level(logging.INFO, "d9d.tracker"), build(provider="log").open(RunConfig(name="run")) as run:
        run.write(LOSS, Scalar(torch.tensor(0.5)))
        run.write(TrackerPoint(name="load", step=4, context={}), Histogram(torch.tensor([1, 2])))
    assert caplog.messages[1:] == ["run step 3 split=train: loss = 0.5", "run step 4: load = [1.0, 2.0]"]


def test_jsonl_lines_are_there_before_the_run_ends(tmp_path):
    path = tmp_path / "made" / "values.jsonl"
    with build(provider="jsonl", path=path).open(RunConfig(name="run", hparams={"lr": 0.1, "dir": tmp_path})) as run:
        run.write(LOSS, Scalar(torch.tensor(0.5, dtype=torch.float64)))
        (line,) = read_lines(path)
        assert line.pop("time") > 1.6e9
        assert line == {"run": "run", "step": 3, "name": "loss", "value": 0.5, "context": {"split": "train"}}
        run.write(LOSS, Histogram(torch.tensor([1, 2])))
        assert read_lines(path)[1]["value"] == [1.0, 2.0]
    (started,) = read_lines(tmp_path / "made" / "values.runs.jsonl")
    assert started["hparams"] == {"lr": 0.1, "dir": str(tmp_path)}


def test_jsonl_appends_on_resume_and_after_half_a_line(tmp_path):
    path = tmp_path / "values.jsonl"
    for step in range(2):
        with build(provider="jsonl", path=path).open(RunConfig(name="run")) as run:
            run.write(TrackerPoint(name="loss", step=step, context={}), Scalar(1.0))
    with path.open("a") as file:
        file.write('{"run": "ru')
    with build(provider="jsonl", path=path).open(RunConfig(name="run")) as run:
        run.write(TrackerPoint(name="loss", step=2, context={}), Scalar(2.0))
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    assert [json.loads(lines[index])["step"] for index in (0, 1, 3)] == [0, 1, 2]


@pytest.mark.parametrize(("value", "text"), [(float("nan"), "nan"), (float("inf"), "inf"), (float("-inf"), "-inf")])
def test_jsonl_stays_valid_json_for_values_that_json_lacks(tmp_path, value, text):
    path = tmp_path / "values.jsonl"
    with build(provider="jsonl", path=path).open(RunConfig(name="run")) as run:
        run.write(LOSS, Scalar(value))
    (line,) = read_lines(path)
    assert line["value"] == text


def test_tensorboard_reads_back_what_was_written(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with build(provider="tensorboard", log_dir=tmp_path).open(RunConfig(name="run", hparams={"lr": 0.1})) as run:
        run.write(LOSS, Scalar(0.5))
        run.write(TrackerPoint(name="load", step=4, context={}), Histogram(torch.tensor([3, 5])))
    events = accumulator.EventAccumulator(str(tmp_path / "run")).Reload()
    (scalar,) = events.Scalars("split.train/loss")
    assert (scalar.step, scalar.value) == (3, 0.5)
    (histogram,) = events.Histograms("load")
    assert histogram.histogram_value.num == 8
    assert list(histogram.histogram_value.bucket) == [3, 5]


def test_tensorboard_writes_at_once_what_is_flushed(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with build(provider="tensorboard", log_dir=tmp_path).open(RunConfig(name="run")) as run:
        run.write(LOSS, Scalar(0.5))
        run.flush()
        events = accumulator.EventAccumulator(str(tmp_path / "run")).Reload()
        assert [event.value for event in events.Scalars("split.train/loss")] == [0.5]


@pytest.mark.parametrize(
    ("fields", "module", "command"),
    [
        (
            {"provider": "tensorboard", "log_dir": "runs"},
            "torch.utils.tensorboard",
            'pip install "d9d-lightning[tensorboard]"',
        ),
        ({"provider": "wandb", "project": "p"}, "wandb", "pip install wandb"),
        ({"provider": "mlflow", "experiment": "e"}, "mlflow", "pip install mlflow"),
        ({"provider": "aim", "repo": "r"}, "aim", "pip install aim"),
    ],
)
def test_a_missing_package_is_named_with_its_command(monkeypatch, fields, module, command):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError) as info:
        build(**fields)
    assert command in str(info.value)
    assert fields["provider"] in str(info.value)


@pytest.mark.parametrize("fields", [{"provider": "unknown"}, {"provider": "null", "extra": 1}, {"provider": "jsonl"}])
def test_wrong_configs_are_refused(fields):
    with pytest.raises(ValidationError):
        CONFIG.validate_python(fields)


@pytest.mark.parametrize("name", ["", "../../elsewhere", "a/../..", "/a", "a\\b", "a\0"])
def test_a_run_is_a_folder_below_that_of_checkpoints(name):
    with pytest.raises(ValidationError, match=r"leave out '\.\.'"):
        RunConfig(name=name)
    assert RunConfig(name="sweep 3/lr=0.1..0.2").name == "sweep 3/lr=0.1..0.2"


def test_names_hold_the_context_in_a_fixed_order():
    assert flat_name(TrackerPoint(name="a/b", step=0, context={})) == "a/b"
    assert flat_name(TrackerPoint(name="x", step=0, context={"b": "2", "a": "1"})) == "a.1/b.2/x"
