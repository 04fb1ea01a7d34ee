"""Report everything that is wrong in one error."""

from collections.abc import Sequence

__all__ = ["raise_problems"]

_NUM_SHOWN = 20


def raise_problems(what: str, problems: Sequence[str]) -> None:
    """Raise ValueError if there are problems.

    Args:
        what: What has them, as the start of a sentence.
        problems: One sentence each.
    """
    if len(problems) == 1:
        raise ValueError(f"{what} cannot be used: {problems[0]}")
    if problems:
        lines = "".join(f"\n- {problem}" for problem in problems[:_NUM_SHOWN])
        more = f"\n- and {len(problems) - _NUM_SHOWN} more" if len(problems) > _NUM_SHOWN else ""
        raise ValueError(f"{what} cannot be used, for {len(problems)} reasons:{lines}{more}")
