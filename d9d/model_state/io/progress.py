"""Bars that show how far reading and writing are."""

from typing import NoReturn

import torch.distributed as dist
from tqdm import tqdm

__all__ = ["progress_bar"]


def progress_bar(
    total: int, unit: str, what: str, show_progress: bool, position: int | None = None, *, is_first: bool | None = None
) -> "tqdm[NoReturn]":
    """Return a bar, which is seen on one rank alone, and where there is a terminal.

    Args:
        total: At how many units it ends.
        unit: What it counts, such as "group". "B": bytes, shown with prefixes.
        what: What is done, such as "reading".
        show_progress: Whether it is wanted.
        position: Line of the bar, among several.
        is_first: Whether this is the rank that shows it. None: rank 0 of the job is.
    """
    if is_first is None:
        is_first = not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
    return tqdm(
        total=total,
        unit=unit,
        unit_scale=unit == "B",
        desc=f"Model state, {what}",
        position=position,
        # None: tqdm asks whether there is a terminal. A bar in a log file is noise.
        disable=None if show_progress and is_first else True,
    )
