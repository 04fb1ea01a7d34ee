"""Text grids by hand, pictures as XML, and the file of a measured step."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from d9d.pipelining import picture
from d9d.pipelining.actions import ACTION_KINDS, ActionBase, ActionWorkType, parse_action, parse_program
from d9d.pipelining.timeline import ActionCosts, Timeline, TimelineEvent, simulate
from d9d.pipelining.visualize import (
    format_grid,
    format_summary,
    read_measured_timeline,
    write_measured_timeline,
    write_timeline,
)

WIDE = 200
ONE_F_ONE_B = parse_program(
    """
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
)
# Two ranks in a V. Rank 1 does nothing before 1 and nothing between 3 and 5.
V_EVENTS = {
    0: [("0F0", 0, 1), ("0F1|3I0", 1, 3), ("3W0", 3, 4)],
    1: [("1F0", 1, 2), ("2F0", 2, 3), ("2B0", 5, 7)],
}
SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(rows: dict[int, list[tuple[str, float, float]]], num_stages: int) -> Timeline:
    return Timeline(
        events={rank: [TimelineEvent(parse_action(a), s, e) for a, s, e in row] for rank, row in rows.items()},
        busy={rank: sum(end - start for _, start, end in row) for rank, row in rows.items()},
        peak_activations=dict.fromkeys(rows, 2),
        num_stages=dict.fromkeys(rows, num_stages),
    )


def text(*lines: str) -> str:
    return "\n".join(lines)


def test_grid_of_1f1b():
    assert format_grid(simulate(ONE_F_ONE_B, ActionCosts()), WIDE) == text(
        "time    0  1  2  3  4  5  6  7  8  9  10 11",
        "rank 0  F0 F1 .  .  B0--- F2 B1--- .  B2---",
        "rank 1  .  F0 B0--- F1 B1--- F2 B2--- .  .",
        "",
        "F forward, B backward; . waits; a column is 1",
    )


def test_grid_of_composed_actions_and_several_stages():
    assert format_grid(timeline_of(V_EVENTS, num_stages=2), WIDE) == text(
        "time    0   1   2   3   4   5   6",
        "rank 0  0F0 0F1|3I0 3W0 .   .   .",
        "rank 1  .   1F0 2F0 .   .   2B0----",
        "",
        "F forward, B backward, I gradients of inputs, W gradients of weights; . waits; a column is 1",
    )


def test_columns_of_a_grid_are_what_all_times_are_multiples_of():
    grid = format_grid(timeline_of({0: [("0F0", 0, 2), ("0B0", 3.5, 6.5)]}, num_stages=1), WIDE, unit="ms")
    assert grid == text(
        "time    0   1   2   3   4   5   6",
        "rank 0  F0----- . . . B0---------",
        "",
        "F forward, B backward; . waits; a column is 0.5 ms",
    )


def test_grid_of_measured_times_shows_each_action():
    row = [("0F0", 0.0, 0.011), ("0F1", 0.0113, 0.0217), ("0B0", 0.0301, 0.0519), ("0B1", 0.052, 0.074)]
    grid = format_grid(timeline_of({0: row}, num_stages=1), WIDE, unit="s")
    assert re.findall(r"[FB]\d", grid.splitlines()[1]) == ["F0", "F1", "B0", "B1"]
    assert grid.endswith("a column is 0.0104 s")


def test_microbatches_of_several_digits_keep_their_columns():
    row = [(f"0F{m}", m, m + 1) for m in range(9, 12)]
    assert format_grid(timeline_of({0: row}, num_stages=1), WIDE).splitlines()[1] == (
        "rank 0  " + ".   " * 9 + "F9  F10 F11"
    )


def test_a_grid_is_cut_with_a_note():
    grid = format_grid(simulate(ONE_F_ONE_B, ActionCosts()), 24)
    assert grid.splitlines()[:4] == [
        "time    0  1  2  3  4",
        "rank 0  F0 F1 .  .  B0-",
        "rank 1  .  F0 B0--- F1",
        "... cut at time 5 of 12: widen the terminal (or set COLUMNS), or see the picture",
    ]


def test_many_ranks_are_cut_and_summed_up():
    ranks = {rank: [(f"{rank}F0", rank, rank + 1)] for rank in range(20)}
    timeline = timeline_of(ranks, num_stages=1)
    assert "rank 15 " in format_grid(timeline, WIDE)
    assert "rank 16 " not in format_grid(timeline, WIDE)
    assert "... 4 more ranks" in format_grid(timeline, WIDE)
    assert re.findall(r"\d+ \(.*\)", format_summary(timeline)) == [
        "0 (first)",
        "19 (last)",
        "0 (least memory)",
        "0 (most memory)",
    ]


def test_grid_of_nothing():
    assert format_grid(timeline_of({0: []}, num_stages=0), WIDE).splitlines()[1] == "rank 0"


def test_summary_of_1f1b():
    # Each rank computes 9 of 12; rank 0 has two microbatches alive.
    assert format_summary(simulate(ONE_F_ONE_B, ActionCosts())) == text(
        "makespan 12, bubble 25.0%",
        "",
        "rank  stages  bubble  peak activations  in microbatches",
        "   0       1   25.0%                 2                2",
        "   1       1   25.0%                 1                1",
    )


def test_summary_counts_activations_in_layers_of_a_rank():
    summary = format_summary(timeline_of(V_EVENTS, num_stages=2), unit="s").splitlines()
    assert summary[0] == "makespan 7 s, bubble 42.9%"  # 6 of 14 rank seconds wait
    assert summary[3].split() == ["0", "2", "42.9%", "2", "1"]


def rects(svg: ElementTree.Element) -> list[ElementTree.Element]:
    return list(svg.iter(f"{SVG}rect"))


def test_svg_has_a_rectangle_per_action(tmp_path: Path):
    write_timeline(simulate(ONE_F_ONE_B, ActionCosts()), tmp_path / "a.svg", title="1 < 2 & 3")
    svg = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert len(rects(svg)) == 12
    assert [t.text for t in svg.iter(f"{SVG}title")][:3] == ["0F0: 0 to 1", "0F1: 1 to 2", "0B0: 4 to 6"]
    assert "1 < 2 & 3" in [t.text for t in svg.iter(f"{SVG}text")]
    labels = [t.text for t in svg.iter(f"{SVG}text") if (t.get("class") or "").startswith("on")]
    assert " ".join(label or "" for label in labels) == "F0 F1 B0 F2 B1 B2 F0 B0 F1 B1 F2 B2"


def test_svg_is_to_scale(tmp_path: Path):
    write_timeline(simulate(ONE_F_ONE_B, ActionCosts()), tmp_path / "a.svg")
    first, _, backward, *_ = rects(ElementTree.parse(tmp_path / "a.svg").getroot())
    unit = float(first.get("width", ""))
    assert float(backward.get("x", "")) == pytest.approx(4 * unit)
    assert float(backward.get("width", "")) == pytest.approx(2 * unit)


def test_parts_of_a_composed_action_lie_above_each_other(tmp_path: Path):
    write_timeline(timeline_of(V_EVENTS, num_stages=2), tmp_path / "a.svg")
    svg = ElementTree.parse(tmp_path / "a.svg").getroot()
    _, upper, lower, *_ = rects(svg)
    assert len(rects(svg)) == 7
    assert (upper.get("x"), upper.get("width")) == (lower.get("x"), lower.get("width"))
    assert float(lower.get("y", "")) == float(upper.get("height", ""))
    classes = [rect.get("class") for rect in rects(svg)]
    assert classes == ["F0", "F0", "I1", "W1", "F0", "F1", "B1"]


def test_large_svg_has_no_labels_and_a_huge_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    timeline = simulate(ONE_F_ONE_B, ActionCosts())
    monkeypatch.setattr(picture, "MAX_ANNOTATED_ACTIONS", 11)
    write_timeline(timeline, tmp_path / "a.svg")
    svg = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert len(rects(svg)) == 12
    assert not list(svg.iter(f"{SVG}title"))
    monkeypatch.setattr(picture, "MAX_DRAWN_ACTIONS", 11)
    with pytest.raises(ValueError, match=r"12 actions would be too large .*--output none"):
        write_timeline(timeline, tmp_path / "b.svg")
    assert not (tmp_path / "b.svg").exists()


class PageReader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_html_has_picture_and_summary_and_escapes_titles(tmp_path: Path):
    write_timeline(simulate(ONE_F_ONE_B, ActionCosts()), tmp_path / "a.html", title="<script>x</script>")
    page = PageReader()
    page.feed((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert "script" not in page.tags
    assert page.texts.count("<script>x</script>") == 2
    assert page.tags.count("rect") == 12
    assert page.tags.count("td") == 10
    assert "makespan 12, bubble 25.0%" in page.texts


class OddAction(ActionBase):
    work_type = ActionWorkType.compute
    has_backward_work = False

    def apply(self, ctx: object) -> None:
        raise AssertionError

    def __str__(self) -> str:
        return "<&>"


def test_actions_of_a_users_own_are_drawn_and_escaped(tmp_path: Path):
    timeline = Timeline(
        events={0: [TimelineEvent(OddAction(), 0, 1)]}, busy={0: 1}, peak_activations={0: 0}, num_stages={0: 0}
    )
    write_timeline(timeline, tmp_path / "a.svg")
    svg = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert [rect.get("class") for rect in rects(svg)] == ["X0"]
    assert next(svg.iter(f"{SVG}title")).text == "<&>: 0 to 1"
    assert "rank 0  <&>" in format_grid(timeline, WIDE)


def test_other_files_are_no_pictures(tmp_path: Path):
    with pytest.raises(ValueError, match=r"a\.png is no picture: its name must end in \.svg or \.html"):
        write_timeline(simulate(ONE_F_ONE_B, ActionCosts()), tmp_path / "a.png")


def test_measured_timeline_round_trip(tmp_path: Path):
    simulated = simulate(ONE_F_ONE_B, ActionCosts(forward=0.25, transfer=0.125))
    write_measured_timeline(simulated.events, tmp_path / "step.json")
    assert read_measured_timeline(tmp_path / "step.json") == simulated


def test_measured_times_start_at_the_first_action_and_transfers_are_left_out(tmp_path: Path):
    rows = {1: [("1RECV_F0", 100.0, 101.5), ("1F0", 101.5, 102.5)], 0: [("0F0", 100.5, 101.0), ("0SEND_F0", 101, 101)]}
    events = {rank: [TimelineEvent(parse_action(a), s, e) for a, s, e in row] for rank, row in rows.items()}
    write_measured_timeline(events, tmp_path / "step.json")
    read = read_measured_timeline(tmp_path / "step.json")
    assert [(rank, str(a), start, end) for rank, row in read.events.items() for a, start, end in row] == [
        (0, "0F0", 0.0, 0.5),
        (1, "1F0", 1.0, 2.0),
    ]
    assert read.busy == {0: 0.5, 1: 1.0}


def test_measured_actions_of_a_users_own_need_their_kind(tmp_path: Path):
    path = tmp_path / "step.json"
    path.write_text('{"ranks": {"0": [{"action": "0ODD0", "start_s": 0, "end_s": 1}]}}', encoding="utf-8")
    with pytest.raises(ValueError, match="'0ODD0' is not an action"):
        read_measured_timeline(path)
    read = read_measured_timeline(path, {**ACTION_KINDS, "ODD": lambda stage, microbatch: OddAction()})
    assert read.busy == {0: 1.0}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"ranks": []}',
        '{"ranks": {"zero": []}}',
        '{"ranks": {"0": [{"action": "0F0"}]}}',
        '{"ranks": {"0": [{"action": "0F0", "start_s": 2, "end_s": 1}]}}',
        '{"ranks": {"0": [{"action": "0F0", "start_s": NaN, "end_s": 1}]}}',
        '{"ranks": {"0": [7]}}',
    ],
)
def test_other_files_are_no_measured_timelines(tmp_path: Path, content: str):
    path = tmp_path / "step.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r'step\.json holds no measured timeline \(.*\): expected \{"ranks"'):
        read_measured_timeline(path)
