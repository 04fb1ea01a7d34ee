"""Shows timelines of pipeline programs: as text, as a picture, and as the file of a measured step. Without torch."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from d9d.pipelining.actions import (
    ACTION_KINDS,
    ActionBase,
    ActionKinds,
    ActionWorkType,
    BackwardFullInputComputeAction,
    BackwardWeightComputeAction,
    ForwardComputeAction,
    flat_actions,
    parse_action,
)
from d9d.pipelining.picture import KIND_NAMES, action_kind, svg_timeline, typical_duration
from d9d.pipelining.timeline import Timeline, TimelineEvent

__all__ = [
    "PICTURE_SUFFIXES",
    "format_grid",
    "format_summary",
    "read_measured_timeline",
    "write_measured_timeline",
    "write_timeline",
]

PICTURE_SUFFIXES = (".svg", ".html")
"""File names that `write_timeline` knows."""

_MAX_RANKS = 16
"""Of longer pipelines, the grid shows the first ranks and the summary the extremes."""

_MIN_CELL = 2
"""Characters per column of the grid."""


# ---- Text ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Bar:
    """An action in the grid: its label, and the columns from `start` up to `end` without it."""

    label: str
    start: int
    end: int


def format_grid(timeline: Timeline, width: int, unit: str = "") -> str:
    """Write a timeline as a grid of ranks and time, one line per rank.

    An action stands where it starts: kind and microbatch, after the stage if ranks host several. ``-`` fills the time
    that it takes beyond one column, ``.`` is a column in which the rank waits. A column is a time that all starts and
    ends are multiples of; where there is none, as in measured timelines, it is about the shortest action, or a small
    part of the whole if that is longer.

    Args:
        timeline: What to write.
        width: Number of characters per line. What is beyond is left out, and a line says so.
        unit: Unit of its times, such as ``s``.
    """
    slot = _slot(timeline)
    ranks = sorted(timeline.events)
    shown = ranks[:_MAX_RANKS]
    with_stage = max(timeline.num_stages.values(), default=0) > 1
    bars = {rank: _bars(timeline.events[rank], slot, width // _MIN_CELL, with_stage) for rank in shown}
    gutter = len(f"rank {ranks[-1]}") + 2 if ranks else 0
    widths = [math.ceil((len(bar.label) + 1) / (bar.end - bar.start)) for row in bars.values() for bar in row]
    cell = max(_MIN_CELL, *widths) if widths else _MIN_CELL
    num_columns = math.ceil(timeline.makespan / slot - 0.5)
    num_shown = min(num_columns, max((width - gutter) // cell, 1))

    lines = ["time".ljust(gutter) + _ruler(num_shown, cell, slot)]
    lines += [f"rank {rank}".ljust(gutter) + _row(bars[rank], num_shown, cell) for rank in shown]
    if len(shown) < len(ranks):
        lines.append(f"... {len(ranks) - len(shown)} more ranks")
    if num_shown < num_columns:
        lines.append(
            f"... cut at time {num_shown * slot:.6g} of {timeline.makespan:.6g}: widen the terminal (or set COLUMNS), "
            "or see the picture"
        )
    lines += ["", _key(timeline, shown, slot, unit)]
    return "\n".join(line.rstrip() for line in lines)


_MEASURED_COLUMNS = 60


def _slot(timeline: Timeline) -> float:
    shortest = typical_duration(timeline)
    times = {time for events in timeline.events.values() for _, start, end in events for time in (start, end)}
    for divisor in (1, 2, 3, 4):
        slot = shortest / divisor
        if all(abs(time / slot - round(time / slot)) < 1e-6 for time in times):
            return _greatest_slot(slot, times)
    # Measured: actions that take next to nothing must not stretch the others over many lines.
    return max(shortest, timeline.makespan / _MEASURED_COLUMNS)


def _greatest_slot(slot: float, times: Iterable[float]) -> float:
    return slot * (math.gcd(*(round(time / slot) for time in times)) or 1)


def _column(time: float, slot: float) -> int:
    # Columns whose middle is in an action show it; so actions of at least a column are always seen, and never twice.
    return math.ceil(time / slot - 0.5)


def _bars(events: Iterable[TimelineEvent], slot: float, num_columns: int, with_stage: bool) -> list[_Bar]:
    columns = ((event.action, _column(event.start, slot), _column(event.end, slot)) for event in events)
    return [
        _Bar(_label(action, with_stage), start, end) for action, start, end in columns if start < min(end, num_columns)
    ]


def _label(action: ActionBase, with_stage: bool) -> str:
    parts = [str(part) for part in flat_actions((action,))]
    return "|".join(parts if with_stage else [part.lstrip("0123456789") for part in parts])


def _row(bars: Iterable[_Bar], num_columns: int, cell: int) -> str:
    text, column = "", 0
    for bar in bars:
        if bar.start >= num_columns:
            break
        text += ".".ljust(cell) * (bar.start - column)
        label = bar.label.ljust(cell - 1) if bar.end - bar.start == 1 else bar.label
        text += label.ljust((bar.end - bar.start) * cell - 1, "-") + " "
        column = bar.end
    return (text + ".".ljust(cell) * (num_columns - column))[: num_columns * cell]


def _ruler(num_columns: int, cell: int, slot: float) -> str:
    longest = max((len(f"{column * slot:.4g}") for column in range(num_columns)), default=1)
    step = math.ceil((longest + 1) / cell)
    return "".join(f"{column * slot:.4g}".ljust(step * cell) for column in range(0, num_columns, step))


def _key(timeline: Timeline, ranks: Iterable[int], slot: float, unit: str) -> str:
    actions = flat_actions(event.action for rank in ranks for event in timeline.events[rank])
    kinds = {action_kind(action) for action in actions} - {"X"}
    names = [f"{kind} {name}" for kind, name in KIND_NAMES.items() if kind in kinds]
    return f"{', '.join(names)}; . waits; a column is {slot:.4g}{unit and ' ' + unit}"


# ---- Summary ---------------------------------------------------------------------------------------------------------

_SummaryRow: TypeAlias = tuple[str, ...]
_SUMMARY_HEAD: _SummaryRow = ("rank", "stages", "bubble", "peak activations", "in microbatches")


def format_summary(timeline: Timeline, unit: str = "") -> str:
    """Write makespan, bubble, and the peak of live activations of each rank; of the extremes if there are many ranks.

    An activation is a microbatch in one stage. Divided by the stages of the rank, activations are comparable between
    schedules: as microbatches in all layers of the rank.

    Args:
        timeline: What to sum up.
        unit: Unit of its times, such as ``s``.
    """
    rows = [_SUMMARY_HEAD, *_summary_rows(timeline)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([_totals(timeline, unit), "", *table])


def _totals(timeline: Timeline, unit: str) -> str:
    return f"makespan {timeline.makespan:.6g}{unit and ' ' + unit}, bubble {timeline.bubble_fraction:.1%}"


def _summary_rows(timeline: Timeline) -> list[_SummaryRow]:
    ranks = sorted(timeline.events)
    if len(ranks) <= _MAX_RANKS:
        return [_summary_row(str(rank), timeline, rank) for rank in ranks]
    least = min(ranks, key=lambda rank: timeline.peak_microbatches[rank])
    most = max(ranks, key=lambda rank: timeline.peak_microbatches[rank])
    named = {"first": ranks[0], "last": ranks[-1], "least memory": least, "most memory": most}
    return [_summary_row(f"{rank} ({name})", timeline, rank) for name, rank in named.items()]


def _summary_row(name: str, timeline: Timeline, rank: int) -> _SummaryRow:
    bubble = 1 - timeline.busy[rank] / timeline.makespan if timeline.makespan else 0.0
    peak, in_layers = timeline.peak_activations[rank], timeline.peak_microbatches[rank]
    return name, str(timeline.num_stages[rank]), f"{bubble:.1%}", str(peak), f"{in_layers:.4g}"


# ---- Pictures --------------------------------------------------------------------------------------------------------

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ margin: 1.5rem; font: 14px/1.5 system-ui, -apple-system, 'Segoe UI', sans-serif; color: #222; }}
.timeline {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin-top: 1rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .15rem 1.2rem .15rem 0; text-align: right; border-bottom: 1px solid #e4e6e9; }}
</style>
<div class="timeline">
{picture}</div>
<p>{totals}</p>
<table>
{table}
</table>
</html>
"""


def write_timeline(timeline: Timeline, path: Path, title: str = "Pipeline timeline", unit: str = "") -> None:
    """Write a timeline as an SVG picture, or as an HTML page with picture and summary.

    Both show text, start and end of an action under the pointer, up to `picture.MAX_ANNOTATED_ACTIONS` actions.

    Args:
        timeline: What to draw.
        path: File to write; its suffix is one of `PICTURE_SUFFIXES`.
        title: Heading of the picture.
        unit: Unit of its times, such as ``s``.

    Raises:
        ValueError: For another suffix, and for pictures that would be too large to open.
    """
    match path.suffix:
        case ".svg":
            path.write_text(svg_timeline(timeline, title, unit), encoding="utf-8")
        case ".html":
            path.write_text(_page(timeline, title, unit), encoding="utf-8")
        case _:
            raise ValueError(f"{path} is no picture: its name must end in {' or '.join(PICTURE_SUFFIXES)}.")


def _page(timeline: Timeline, title: str, unit: str) -> str:
    rows = [("th", _SUMMARY_HEAD), *(("td", row) for row in _summary_rows(timeline))]
    return _PAGE.format(
        title=escape(title),
        picture=svg_timeline(timeline, title, unit),
        totals=escape(_totals(timeline, unit)),
        table="\n".join(f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in row)}</tr>" for tag, row in rows),
    )


# ---- Measured steps --------------------------------------------------------------------------------------------------


def write_measured_timeline(events_by_rank: Mapping[int, Sequence[TimelineEvent]], path: Path) -> None:
    """Write when each rank has done what in a step, for `read_measured_timeline`. One rank writes for all.

    Args:
        events_by_rank: Actions of each rank in their order, in seconds on a clock that the ranks share.
        path: JSON file to write.
    """
    ranks = {
        str(rank): [{"action": str(action), "start_s": start, "end_s": end} for action, start, end in events]
        for rank, events in sorted(events_by_rank.items())
    }
    path.write_text(json.dumps({"ranks": ranks}), encoding="utf-8")


def read_measured_timeline(path: Path, kinds: ActionKinds = ACTION_KINDS) -> Timeline:
    """Read the timeline of a step that was measured, in seconds since its first action. Sends and receives are left out.

    Args:
        path: JSON file of `write_measured_timeline`.
        kinds: Actions to know; see `parse_action`.

    Raises:
        ValueError: If the file is something else; the message says what is wrong where.
    """
    try:
        ranks = json.loads(path.read_text(encoding="utf-8"))["ranks"]
        read = {int(rank): [_read_event(event, kinds) for event in events] for rank, events in ranks.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{path} holds no measured timeline ({error}): expected {{"ranks": {{"0": [{{"action": "0F0", '
            '"start_s": 0.0, "end_s": 0.1}, ...], "1": ...}}.'
        ) from error
    return _measured_timeline({rank: [e for e in read[rank] if _computes(e.action)] for rank in sorted(read)})


def _read_event(event: Mapping[str, Any], kinds: ActionKinds) -> TimelineEvent:
    read = TimelineEvent(parse_action(event["action"], kinds), float(event["start_s"]), float(event["end_s"]))
    if not read.start <= read.end < math.inf:
        raise ValueError(f"{read.action} lasts from {read.start} to {read.end}")
    return read


def _measured_timeline(measured: Mapping[int, Sequence[TimelineEvent]]) -> Timeline:
    begin = min((event.start for events in measured.values() for event in events), default=0.0)
    actions = {rank: list(flat_actions(event.action for event in events)) for rank, events in measured.items()}
    return Timeline(
        events={rank: [TimelineEvent(a, s - begin, e - begin) for a, s, e in row] for rank, row in measured.items()},
        busy={rank: sum(end - start for _, start, end in row) for rank, row in measured.items()},
        peak_activations={rank: _peak_activations(row) for rank, row in actions.items()},
        num_stages={rank: len(set(map(_stage, row)) - {None}) for rank, row in actions.items()},
    )


def _computes(action: ActionBase) -> bool:
    return any(part.work_type is ActionWorkType.compute for part in flat_actions((action,)))


def _stage(action: ActionBase) -> int | None:
    match action:
        case ForwardComputeAction() | BackwardFullInputComputeAction():
            return action.stage_idx
        case _:
            return None


def _peak_activations(actions: Iterable[ActionBase]) -> int:
    alive = peak = 0
    for action in actions:
        match action:
            case ForwardComputeAction():
                alive += 1
                peak = max(peak, alive)
            case BackwardFullInputComputeAction(full_backward=True) | BackwardWeightComputeAction():
                alive -= 1
            case _:
                pass
    return peak
