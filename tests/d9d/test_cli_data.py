"""`python -m d9d data plan`."""

import re
from pathlib import Path

import pytest

from d9d.cli import main

JOB = """
mesh: {data_parallel_shard: 3}
trainer: {schedule: {total_steps: 5}}
data: {global_batch_size: 12, microbatch_size: 2, num_workers: 0}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def plan(path: Path, *words: str, num_samples: int = 100) -> int:
    return main(["data", "plan", str(path), "--num-samples", str(num_samples), *words])


def ranks_of(text: str) -> dict[str, str]:
    table = text[text.index("ranks ") :].partition("\n\n")[0].splitlines()[1:]
    return {line.split()[0]: line.partition(" ")[2].strip() for line in table}


def test_a_job_is_shown_for_all_ranks_that_it_fits(job, capsys):
    assert plan(job) == 0
    text = capsys.readouterr().out
    assert "run      5 steps, 0.625 epochs" in text
    assert {size: row.split()[1] for size, row in ranks_of(text).items()} == {
        "1": "60",
        "2": "30",
        "3": "20",
        "6": "10",
    }


def test_the_data_settings_alone_will_do(tmp_path, capsys):
    path = tmp_path / "data.yaml"
    path.write_text("{global_batch_size: 4, microbatch_size: 2, num_workers: 0}")
    assert plan(path) == 0
    assert list(ranks_of(capsys.readouterr().out)) == ["1", "2"]


def test_the_number_of_samples_may_stand_in_the_config_or_nowhere(job, capsys):
    words = ["data", "plan", str(job), "--dp", "1,2,4,8"]
    assert main(words) == 1
    text = capsys.readouterr().out
    assert "epoch    floor(N / 12) steps" in text
    assert ranks_of(text)["2"].split() == ["3", "30"]
    job.write_text(JOB.replace("{global", "{num_samples: 100, global"))
    assert main(words) == 1
    assert "run      5 steps, 0.625 epochs" in capsys.readouterr().out
    job.write_text(JOB.replace("{global", "{num_samples: 11, global"))
    with pytest.raises(SystemExit):
        main(words)
    assert "11 samples, fewer than one global batch" in capsys.readouterr().err


def test_ranks_that_do_not_fit_are_told_and_mended(job, capsys):
    assert plan(job, "--dp", "2,4") == 1
    rows = ranks_of(capsys.readouterr().out)
    assert rows["2"].startswith("3 ")
    assert rows["4"].endswith("(4 * 2 = 8). Use 8 or 16.")


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (JOB, ("--dp", "2,x"), "'2,x' is no list of numbers of ranks"),
        (JOB, ("--dp", "0"), "'0' is no list"),
        (JOB.replace("12", "11").replace("num_workers", "workers"), (), r"workers \(\d+\) is unknown"),
        (
            JOB.replace("12", "11"),
            (),
            r"global_batch_size \(11\) is not a multiple of microbatch_size \(2\)\. Use 10 or 12",
        ),
        (JOB.replace("total_steps: 5", "total_steps: 50"), (), r"total_steps \(50\) is more than the data has \(8\)"),
        (JOB.replace("12", "120"), (), "100 samples, fewer than one global batch"),
        (
            JOB.replace("total_steps: 5", "steps: 5").replace("num_workers", "workers"),
            (),
            r"\n- data.workers \(\d+\) is unknown.*\n- trainer.schedule.steps \(5\) is unknown",
        ),
        (
            "data: [1]\ntrainer: [2]\nmesh: [3]",
            (),
            "\n- data is no mapping.*\n- mesh is no mapping.*\n- trainer: must hold settings by name",
        ),
        ("[1, 2]", (), "must hold settings by name"),
        ("{", (), "is no YAML"),
    ],
)
def test_what_is_wrong_is_told(tmp_path, capsys, text, words, message):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit) as caught:
        plan(path, *words)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err), captured.err


def test_a_missing_file_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        plan(tmp_path / "none.yaml")
    assert "none.yaml" in capsys.readouterr().err
