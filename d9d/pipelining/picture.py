"""Draws timelines of pipeline programs as SVG: one row per rank, one rectangle per action. Plain text, without torch."""

import dataclasses
import math
from collections.abc import Iterator
from html import escape

from d9d.pipelining.actions import (
    ActionBase,
    BackwardFullInputComputeAction,
    BackwardWeightComputeAction,
    ForwardComputeAction,
    flat_actions,
)
from d9d.pipelining.timeline import Timeline, TimelineEvent

__all__ = [
    "KIND_NAMES",
    "MAX_ANNOTATED_ACTIONS",
    "MAX_DRAWN_ACTIONS",
    "action_kind",
    "check_drawable",
    "svg_timeline",
    "typical_duration",
]

MAX_DRAWN_ACTIONS = 500_000
"""More actions than these are no picture: at 60 bytes each, browsers stop to open the file."""
MAX_ANNOTATED_ACTIONS = 20_000
"""Up to this number, actions have labels and hover texts, which triple the size of the file."""

KIND_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
    "X": "other",
}
"""What the letters in labels mean; `X` stands for actions of a user's own."""

# From Okabe and Ito's palette, whose colours stay apart under all common colour blindnesses; the teal differs from the
# green in lightness too.
_COLOURS = {"F": (0, 104, 170), "B": (0, 128, 88), "I": (73, 198, 190), "W": (232, 152, 0), "X": (120, 120, 120)}
_LIGHTEST_SHADE = 0.55

_GUTTER, _HEADER, _FOOTER, _MARGIN = 64, 74, 34, 84
_BAR_PX, _MIN_PLOT_PX, _MAX_PLOT_PX = 26.0, 600.0, 12_000.0
_MAX_TALL_ROWS = 16
_CHARACTER_PX = 6.3
_LABEL_PX = 10

_SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<path fill="#fff" d="M0 0H{width}V{height}H0Z"/>"""
_STYLE = f"""text{{font:{_LABEL_PX}px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#444}}
.title{{font-size:14px;font-weight:600;fill:#111}}.sub{{font-size:11px}}.end{{text-anchor:end}}.mid{{text-anchor:middle}}
.row{{fill:#f0f1f3}}.tick{{stroke:#c9ccd1;stroke-width:1}}.on{{text-anchor:middle;pointer-events:none}}
.light{{fill:#fff}}.dark{{fill:#111}}"""


def action_kind(action: ActionBase) -> str:
    """Return the letter of an action that is not composed: a key of `KIND_NAMES`."""
    match action:
        case ForwardComputeAction():
            return "F"
        case BackwardFullInputComputeAction(full_backward=full):
            return "B" if full else "I"
        case BackwardWeightComputeAction():
            return "W"
        case _:
            return "X"


def typical_duration(timeline: Timeline) -> float:
    """Return a short duration among the actions: the shortest one, but for outliers of measured timelines."""
    durations = sorted(e.end - e.start for events in timeline.events.values() for e in events if e.end > e.start)
    return durations[len(durations) // 20] if durations else 1.0


def check_drawable(timeline: Timeline) -> None:
    """Refuse timelines that no browser would open.

    Raises:
        ValueError: If there are more than `MAX_DRAWN_ACTIONS` actions.
    """
    num_actions = sum(map(len, timeline.events.values()))
    if num_actions > MAX_DRAWN_ACTIONS:
        raise ValueError(
            f"A picture of {num_actions} actions would be too large to open (limit: {MAX_DRAWN_ACTIONS}). "
            "Draw fewer microbatches, or none (--output none)."
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Where things are, in pixels."""

    px_per_time: float
    plot_width: float
    row_height: int
    num_rows: int
    annotated: bool

    @property
    def bar_height(self) -> int:
        return self.row_height - 4

    @property
    def width(self) -> int:
        return math.ceil(_GUTTER + self.plot_width + _MARGIN)

    @property
    def height(self) -> int:
        return _HEADER + self.num_rows * self.row_height + _FOOTER


def _layout(timeline: Timeline) -> _Layout:
    makespan = timeline.makespan or 1.0
    wanted = makespan / typical_duration(timeline) * _BAR_PX
    plot_width = min(max(wanted, _MIN_PLOT_PX), _MAX_PLOT_PX)
    num_rows = len(timeline.events)
    return _Layout(
        px_per_time=plot_width / makespan,
        plot_width=plot_width,
        row_height=30 if num_rows <= _MAX_TALL_ROWS else 18,
        num_rows=num_rows,
        annotated=sum(map(len, timeline.events.values())) <= MAX_ANNOTATED_ACTIONS,
    )


def _shade(kind: str, chunk: int, num_chunks: int) -> tuple[int, int, int]:
    to_white = _LIGHTEST_SHADE * chunk / max(num_chunks - 1, 1)
    red, green, blue = (round(value + (255 - value) * to_white) for value in _COLOURS[kind])
    return red, green, blue


def _is_dark(colour: tuple[int, int, int]) -> bool:
    red, green, blue = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _chunk_of_stage(timeline: Timeline) -> dict[int, int]:
    """Place of each stage among the stages of its rank, which chooses its shade."""
    chunks: dict[int, int] = {}
    for events in timeline.events.values():
        actions = flat_actions(event.action for event in events)
        stages = {stage for action in actions if (stage := _stage_and_microbatch(action)[0]) >= 0}
        chunks |= {stage: chunk for chunk, stage in enumerate(sorted(stages))}
    return chunks


class _Painter:
    """Draws the actions of a timeline, and remembers which classes of rectangles it has used."""

    def __init__(self, timeline: Timeline, layout: _Layout) -> None:
        self._layout = layout
        self._chunks = _chunk_of_stage(timeline)
        self._num_chunks = max(self._chunks.values(), default=0) + 1
        self._one_stage = self._num_chunks == 1
        self.used: set[tuple[str, int]] = set()

    def legend(self) -> Iterator[str]:
        """Explain the colours of what was drawn: one box per shade of a kind, then its name."""
        x = float(_GUTTER)
        for kind, name in KIND_NAMES.items():
            shades = sorted(chunk for used, chunk in self.used if used == kind)
            for chunk in shades:
                yield f'<path class="{kind}{chunk}" d="M{x:.6g} 51h12v12h-12Z"/>'
                x += 12
            if shades:
                yield f'<text x="{x + 5:.6g}" y="61">{name}</text>'
                x += 22 + len(name) * _CHARACTER_PX
        if not self._one_stage:
            yield f'<text x="{x:.6g}" y="61">lighter: later stages of the rank</text>'

    def fills(self) -> str:
        """Give the classes of what was drawn their colours."""
        return "".join(
            f".{kind}{chunk}{{fill:rgb({','.join(map(str, self._colour(kind, chunk)))})}}"
            for kind, chunk in sorted(self.used)
        )

    def event(self, event: TimelineEvent) -> Iterator[str]:
        """Draw an event; the parts of a composed action share its time and lie above each other."""
        parts = list(flat_actions((event.action,)))
        height = self._layout.bar_height / len(parts)
        for index, part in enumerate(parts):
            yield self._part(part, event, index * height, height)

    def _colour(self, kind: str, chunk: int) -> tuple[int, int, int]:
        return _shade(kind, chunk, self._num_chunks)

    def _part(self, action: ActionBase, event: TimelineEvent, y: float, height: float) -> str:
        kind = action_kind(action)
        stage, microbatch = _stage_and_microbatch(action)
        chunk = self._chunks.get(stage, 0)
        self.used.add((kind, chunk))
        x = event.start * self._layout.px_per_time
        width = (event.end - event.start) * self._layout.px_per_time
        at_y = f' y="{y:.6g}"' if y else ""
        rect = f'<rect class="{kind}{chunk}" x="{x:.6g}"{at_y} width="{width:.6g}" height="{height:.6g}"'
        if not self._layout.annotated:
            return rect + "/>"
        title = f"{event.action}: {event.start:.6g} to {event.end:.6g}"
        drawn = f"{rect}><title>{escape(title)}</title></rect>"
        label = str(action).lstrip("0123456789") if self._one_stage else str(action)
        fitting = [text for text in (label, microbatch) if len(text) * _CHARACTER_PX + 2 <= width]
        if not fitting or height < _LABEL_PX:
            return drawn
        ink = "light" if _is_dark(self._colour(kind, chunk)) else "dark"
        baseline = y + height / 2 + 0.36 * _LABEL_PX
        return f'{drawn}<text class="on {ink}" x="{x + width / 2:.6g}" y="{baseline:.6g}">{escape(fitting[0])}</text>'


def _stage_and_microbatch(action: ActionBase) -> tuple[int, str]:
    match action:
        case ForwardComputeAction() | BackwardFullInputComputeAction() | BackwardWeightComputeAction():
            return action.stage_idx, str(action.microbatch_idx)
        case _:
            return -1, "?"


def svg_timeline(timeline: Timeline, title: str = "", unit: str = "") -> str:
    """Draw a timeline as an SVG document.

    Rows are ranks, and what is left grey is a bubble. Kinds of actions have colours, stages of a rank have shades. Parts
    of a composed action lie above each other. Above `MAX_ANNOTATED_ACTIONS`, labels and hover texts are left out.

    Args:
        timeline: What to draw.
        title: Heading of the picture.
        unit: Unit of its times, such as ``s``.

    Raises:
        ValueError: If the picture would be too large to open.
    """
    check_drawable(timeline)
    layout = _layout(timeline)
    painter = _Painter(timeline, layout)
    rows = [_row(timeline, rank, index, layout, painter) for index, rank in enumerate(sorted(timeline.events))]
    edge = "rect{stroke:#fff;stroke-width:.7}" if typical_duration(timeline) * layout.px_per_time > 6 else ""
    return "\n".join(
        [
            _SVG.format(width=layout.width, height=layout.height),
            f"<style>{_STYLE}\n{painter.fills()}{edge}</style>",
            f'<text class="title" x="{_GUTTER}" y="22">{escape(title)}</text>',
            f'<text class="sub" x="{_GUTTER}" y="40">{escape(_headline(timeline, unit))}</text>',
            *painter.legend(),
            *_axis(timeline.makespan, layout, unit),
            *rows,
            "</svg>\n",
        ]
    )


def _headline(timeline: Timeline, unit: str) -> str:
    peak = max(timeline.peak_microbatches.values(), default=0.0)
    return (
        f"makespan {timeline.makespan:.6g}{unit and ' ' + unit}, bubble {timeline.bubble_fraction:.1%}, "
        f"at most {peak:g} microbatches alive on a rank"
    )


def _row(timeline: Timeline, rank: int, index: int, layout: _Layout, painter: _Painter) -> str:
    y, middle = _HEADER + index * layout.row_height, layout.bar_height / 2 + 0.36 * _LABEL_PX
    end = layout.plot_width
    peak = timeline.peak_microbatches[rank]
    drawn = "\n".join(part for event in timeline.events[rank] for part in painter.event(event))
    return (
        f'<g transform="translate({_GUTTER},{y})"><path class="row" d="M0 0H{end:.6g}V{layout.bar_height}H0Z"/>'
        f'<text class="end" x="-8" y="{middle:.6g}">rank {rank}</text>'
        f'<text x="{end + 8:.6g}" y="{middle:.6g}">peak {peak:g}</text>\n{drawn}\n</g>'
    )


def _axis(makespan: float, layout: _Layout, unit: str) -> Iterator[str]:
    top = _HEADER + layout.num_rows * layout.row_height
    step = _tick_step(60 / layout.px_per_time)
    for index in range(int(makespan / step * (1 + 1e-9)) + 1):
        x = _GUTTER + index * step * layout.px_per_time
        yield f'<path class="tick" d="M{x:.6g} {top}V{top + 5}"/>'
        yield f'<text class="mid" x="{x:.6g}" y="{top + 18}">{index * step:.6g}{unit and " " + unit}</text>'


def _tick_step(least: float) -> float:
    """Return the smallest number above `least` that is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
