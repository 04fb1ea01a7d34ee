"""The command line: what it prints and writes, and what it refuses."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from d9d.cli import main
from d9d.pipelining.actions import parse_program
from d9d.pipelining.schedules import build_program_builder
from d9d.pipelining.timeline import ActionCosts, simulate
from d9d.pipelining.visualize import write_measured_timeline

PIPELINE = "pipeline --schedule 1f1b --pp 2 --microbatches 3 --lookahead 0"
GRID = """\
1f1b, lookahead 0: 2 ranks, 1 stage each, 3 microbatches

time    0  1  2  3  4  5  6  7  8  9  10 11
rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---
rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .

F forward, B backward; . waits; a column is 1
makespan 12, bubble 25.0%

rank  stages  bubble  peak activations  in microbatches
   0       1   25.0%                 2                2
   1       1   25.0%                 1                1
"""


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")


def refusal(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        main(command.split())
    assert caught.value.code == 2
    assert not list(Path.cwd().iterdir())
    return capsys.readouterr().err


def test_grid_and_summary_are_printed_and_a_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(PIPELINE.split()) == 0
    assert capsys.readouterr().out == GRID + "\npicture: pipeline-1f1b-pp2-mb3.svg\n"
    svg = ElementTree.parse(tmp_path / "pipeline-1f1b-pp2-mb3.svg")
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}rect"))) == 12


def test_the_module_runs_without_torch(tmp_path: Path):
    script = (
        "import runpy, sys; sys.argv[0] = 'd9d'\n"
        "try: runpy.run_module('d9d', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r})\n{script}"]
    done = subprocess.run(
        [*command, *PIPELINE.split(), "--output", "none"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.stderr, done.stdout) == ("", GRID)


def test_no_picture_is_written_where_none_is_wanted(tmp_path: Path):
    main([*PIPELINE.split(), "--output", "none"])
    assert not list(tmp_path.iterdir())


def test_pages_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main([*PIPELINE.split(), "--output", "a.html"])
    assert (tmp_path / "a.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out.endswith("picture: a.html\n")


def test_the_program_is_printed_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main([*PIPELINE.split(), "--program"])
    program = build_program_builder("1f1b", lookahead=0).compose(3, 2)
    assert parse_program(capsys.readouterr().out) == program
    assert not list(tmp_path.iterdir())


def test_costs_are_used(capsys: pytest.CaptureFixture[str]):
    costs = "--forward 2 --backward-input 3 --backward-weight 1.5 --transfer 0.5 --output none"
    main([*PIPELINE.split(), *costs.split()])
    program = build_program_builder("1f1b", lookahead=0).compose(3, 2)
    timeline = simulate(program, ActionCosts(forward=2, backward_input=3, backward_weight=1.5, transfer=0.5))
    assert f"makespan {timeline.makespan:g}," in capsys.readouterr().out


def test_measured_steps_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    program = build_program_builder("1f1b", lookahead=0).compose(3, 2)
    write_measured_timeline(simulate(program, ActionCosts()).events, tmp_path / "step 7.json")
    main(["pipeline", "--measured", "step 7.json"])
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == "measured: step 7.json"
    assert GRID.splitlines()[2:5] == shown.splitlines()[2:5]
    assert "makespan 12 s, bubble 25.0%" in shown
    assert (tmp_path / "pipeline-step 7.svg").is_file()


def test_all_problems_are_named_at_once(capsys: pytest.CaptureFixture[str]):
    words = "--schedule gpipe --pp 0 --microbatches -1 --zero-bubble --stages-per-rank 2 --forward -1 --output a.png"
    message = refusal(f"pipeline {words}", capsys)
    for problem in (
        "--pp (0) must be at least 1",
        "--microbatches (-1) must be at least 1",
        "zero bubble is an option of 1f1b only, not of gpipe",
        "gpipe always has 1 stage per rank, not 2",
        "--forward (-1.0) must be a number, and not negative",
        "--output (a.png) must end in .svg or .html, or be none",
    ):
        assert problem in message


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (
            "pipeline --schedule zbv --pp 2 --microbatches 3",
            "choose inference, gpipe, looped_bfs, 1f1b, zero_bubble_v or",
        ),
        ("pipeline --pp 2", "--schedule, --microbatches must be given (or --measured FILE)"),
        (
            "pipeline --schedule zero_bubble_v --stages-per-rank 1 --pp 2 --microbatches 3",
            "always has 2 stages per rank",
        ),
        (f"{PIPELINE} --measured a.json", "leave out --schedule, --pp, --microbatches, --lookahead"),
        ("pipeline --measured a.json", "No such file or directory: 'a.json'"),
        (f"{PIPELINE} --output a/b.svg", "there is no folder a"),
        (f"{PIPELINE} --transfer nan", "--transfer (nan) must be a number"),
        (f"{PIPELINE} --forward 0 --backward-input 0 --backward-weight 0", "must be above 0"),
        ("train", "invalid choice: 'train' (choose from"),
        ("pipline", "Did you mean 'pipeline'?"),
        (f"{PIPELINE} --transfr 1", "unrecognized arguments: --transfr 1. Did you mean '--transfer'?"),
    ],
)
def test_wrong_words_are_refused_with_what_is_valid(command: str, problem: str, capsys: pytest.CaptureFixture[str]):
    assert problem in refusal(command, capsys)


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert not caught.value.code
    assert "pipeline" in capsys.readouterr().out


PAGE = Path(__file__).resolve().parents[2] / "docs" / "pipeline_programs.md"
EXAMPLES = re.findall(
    r"^```console\n\$ python -m d9d (.*)\n((?:.*\n)*?)```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.mark.parametrize(("command", "output"), EXAMPLES)
def test_the_page_shows_what_commands_print(command: str, output: str, capsys: pytest.CaptureFixture[str]):
    main(command.split())
    assert capsys.readouterr().out == output


TABLE = re.findall(
    r"^\| `(\w+)` \| (?:`(.*)`)? ?\| (.*)% \| `(.*)` \| (.*) \| `(.*)` \|$",
    PAGE.read_text(encoding="utf-8"),
    re.MULTILINE,
)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(4, 16), (3, 9)])
@pytest.mark.parametrize(("schedule", "options", "bubble", "bubble_form", "memory", "memory_form"), TABLE)
def test_the_closed_forms_of_the_page_are_what_the_simulator_finds(
    schedule: str,
    options: str,
    bubble: str,
    bubble_form: str,
    memory: str,
    memory_form: str,
    num_ranks: int,
    num_microbatches: int,
):
    lookahead = re.search(r"--lookahead (\d)", options)
    builder = build_program_builder(
        schedule,
        2 if "--stages-per-rank 2" in options else None,
        zero_bubble="--zero-bubble" in options,
        lookahead=int(lookahead[1]) if lookahead else None,
    )
    found = simulate(builder.compose(num_microbatches, num_ranks), ActionCosts())
    sizes = {"p": num_ranks, "m": num_microbatches, "v": builder.num_stages_per_rank}
    assert found.bubble_fraction == pytest.approx(eval(bubble_form, sizes), abs=1e-12)
    assert max(found.peak_microbatches.values()) == eval(memory_form, sizes)
    if (num_ranks, num_microbatches) == (4, 16):
        assert (f"{found.bubble_fraction:.1%}", f"{eval(memory_form, sizes):g}") == (f"{bubble}%", memory)


def test_the_page_has_examples_and_a_table():
    assert (len(EXAMPLES), len(TABLE)) == (3, 9)


@pytest.mark.timeout_s(120)
@pytest.mark.slow
def test_a_large_pipeline_is_planned(capsys: pytest.CaptureFixture[str]):
    main(["pipeline", "--schedule", "zero_bubble_v", "--pp", "64", "--microbatches", "1024", "--output", "none"])
    # 1024 microbatches of two stages with three passes, and 63 passes until the pipeline is full.
    assert f"makespan {2 * 3 * 1024 + 63}, bubble 1.0%" in capsys.readouterr().out
