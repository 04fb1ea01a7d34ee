"""What a rank is doing: written by the thread that works, read by the thread that watches it."""

import contextlib
import sys
import traceback
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import TypeAlias, final

import torch

__all__ = ["Activity", "describe_error_stack", "describe_stack"]

_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = str(Path(_TORCH) / "distributed" / "distributed_c10d.py")
_NUM_FRAMES = 4
_NUM_PATH_PARTS = 3


@final
class Activity:
    """Where the thread that runs a job is.

    That thread writes plain attributes and nothing else, so that telling where it is costs a step nothing. Texts are made
    by those who read, when something is wrong.
    """

    __slots__ = ("limit_s", "place", "step")

    def __init__(self) -> None:
        self.step = 0
        """Step under way, from 1; 0 before the first."""
        self.place: object = "start-up"
        """What is done in it. Its text names it; another object stands for progress."""
        self.limit_s: float | None = None
        """How long it may stay in one place, in seconds; None: for ever."""

    @contextlib.contextmanager
    def inside(self, place: object, limit_s: float | None) -> Generator[None]:
        """Be in a place with a limit of its own while the block runs.

        Args:
            place: What is done.
            limit_s: How long it may take in seconds; None: any time, as where code of the user decides.
        """
        before = self.place, self.limit_s
        self.place, self.limit_s = place, limit_s
        yield
        # Not where the block raises: who reports that asks where it was.
        self.place, self.limit_s = before

    def describe(self) -> str:
        """Return step and place as text."""
        return f"step {self.step}, {self.place}" if self.step else str(self.place)


def describe_stack(thread_id: int) -> str:
    """Return which collective a thread waits in, if any, and its innermost calls outside of torch, a line each."""
    frame = sys._current_frames().get(thread_id)  # pyright: ignore[reportPrivateUsage]  # there is no public name for it
    return "    its thread has ended" if frame is None else _describe_calls(list(traceback.walk_stack(frame)))


def describe_error_stack(error: BaseException) -> str:
    """Return the same of where an error was raised."""
    return _describe_calls(list(traceback.walk_tb(error.__traceback__))[::-1])


_Call: TypeAlias = tuple[FrameType, int]
"""A call, and the line that it is in."""


def _describe_calls(calls: list[_Call]) -> str:
    """Return calls as text; they come with the innermost first."""
    collective = _collective_of(calls)
    waits = [] if collective is None else [f"    in torch.distributed.{collective}"]
    own = [call for call in calls if not call[0].f_code.co_filename.startswith((_TORCH, "<"))][:_NUM_FRAMES]
    lines = [f"    at {_short_path(frame.f_code.co_filename)}:{line} in {frame.f_code.co_name}" for frame, line in own]
    return "\n".join(waits + lines)


def _collective_of(calls: list[_Call]) -> str | None:
    """Return the public function of torch.distributed that was called, the outermost one where they call each other."""
    names: list[str] = []
    for frame, _ in calls:
        code = frame.f_code
        if not code.co_filename.startswith(_TORCH):
            break
        if code.co_filename == _COLLECTIVES and not code.co_name.startswith("_") and code.co_name != "wrapper":
            names.append(code.co_name)
    return names[-1] if names else None


def _short_path(path: str) -> str:
    return "/".join(Path(path).parts[-_NUM_PATH_PARTS:])
