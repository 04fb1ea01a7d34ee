"""Lightning's advice to log with ``sync_dist``, where it would do nothing."""

import warnings
from collections.abc import Callable
from typing import Any, cast

_ADVICE = r"It is recommended to use `self\.log\(.*, sync_dist=True\)`"


def silence_sync_advice() -> Callable[[], None]:
    """Ignore the advice, which is given wherever there are process groups, even to who follows it. No communication.

    For jobs whose ranks all work on the same data: Lightning then ignores ``sync_dist``.

    Returns:
        Undoes it.
    """
    warnings.filterwarnings("ignore", message=_ADVICE, category=UserWarning)
    # A list, which Python documents by the functions that change it only.
    filters = cast("list[Any]", warnings.filters)
    own = filters[0]

    def undo() -> None:
        if own in filters:
            filters.remove(own)

    return undo
