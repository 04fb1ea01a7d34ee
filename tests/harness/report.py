"""Words for what happened on the ranks."""

from collections.abc import Sequence
from itertools import takewhile

from tests.harness.pool import RankReport

_MAX_OUTPUT_CHARS = 20_000

# By rank of interest. The dead come first: their peers then fail with "connection closed", which explains nothing.
_CAUSES = {"died": 0, "failed": 1, "no_group": 2}


def describe_failure(reports: Sequence[RankReport]) -> str:
    """Write one text on a test that did not end well: what went wrong first, then where the other ranks were."""
    parts = [_headline(reports)]
    for kind in (*_CAUSES, "stuck"):
        for text, alike in _group_by_text([report for report in reports if report.kind == kind]).items():
            if kind == "stuck":
                text = trim_stack(text)
            parts.append(f"---- {_names(alike, len(reports))} {_describe_end(alike[0])}: ----\n{text.rstrip()}")
    return "\n".join(parts)


def describe_disagreement(reports: Sequence[RankReport]) -> str:
    """Write a text on ranks that all ended, but not alike."""
    return f"ranks ended differently: {_kinds(reports)}"


def prefix_output(report: RankReport) -> str:
    """Return a rank's output with the rank before each line; of a very long one only the end."""
    text = report.output
    if len(text) > _MAX_OUTPUT_CHARS:
        text = f"... {len(text) - _MAX_OUTPUT_CHARS} characters left out ...\n{text[-_MAX_OUTPUT_CHARS:]}"
    return "\n".join(f"[rank {report.rank}] {line}" for line in text.splitlines())


def trim_stack(text: str) -> str:
    """Leave out of a faulthandler dump what is the same in each: the harness's thread, and the frames below the test."""
    threads = [thread.splitlines() for thread in text.strip().split("\n\n")]
    of_test = [thread for thread in threads if not any(line.endswith("in _read_commands") for line in thread)]
    return "\n\n".join("\n".join(takewhile(_is_above_harness, thread)) for thread in of_test)


def _is_above_harness(line: str) -> bool:
    return not line.endswith("in _run_body")


def _headline(reports: Sequence[RankReport]) -> str:
    stuck = [report for report in reports if report.kind == "stuck"]
    if all(report.kind in ("passed", "stuck") for report in reports):
        return f"hang: {_names(stuck, len(reports))} did not finish within {stuck[0].after_s:g} s"
    return _kinds(sorted(reports, key=lambda report: _CAUSES.get(report.kind, len(_CAUSES))))


def _kinds(reports: Sequence[RankReport]) -> str:
    return ", ".join(f"rank {report.rank} {report.kind}" for report in reports)


def _group_by_text(reports: Sequence[RankReport]) -> dict[str, list[RankReport]]:
    groups: dict[str, list[RankReport]] = {}
    # The first to fail is the likely cause of the rest.
    for report in sorted(reports, key=lambda report: report.after_s):
        groups.setdefault(report.text, []).append(report)
    return groups


def _names(reports: Sequence[RankReport], world_size: int) -> str:
    ranks = ", ".join(str(rank) for rank in sorted(report.rank for report in reports))
    return f"rank{'s' if len(reports) > 1 else ''} {ranks} of {world_size}"


def _describe_end(report: RankReport) -> str:
    if report.kind == "stuck":
        return f"still running after {report.after_s:.1f} s, Python stack"
    return f"{report.kind} after {report.after_s:.1f} s"
