"""What plans of loads and exports have in common: they make many small objects, and keep them."""

import contextlib
import gc
from collections.abc import Generator

__all__ = ["without_garbage_collection"]


@contextlib.contextmanager
def without_garbage_collection() -> Generator[None]:
    """Let Python not look for cycles of objects in the block, of which a plan has none.

    It would look at all objects of the process again and again as their number grows, which takes longer than a plan of ten
    thousands of tensors itself. Other threads make no collections either meanwhile.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
