"""The error file of torchelastic, from which torchrun takes the error that it shows as the root cause of all.

``torch.distributed.elastic.multiprocessing.errors.record`` writes it for those who wrap their main function. Here it is
written without that, as soon as an error is known.
"""

import contextlib
import json
import os
import time
import traceback
from collections.abc import Generator
from pathlib import Path

from d9d.core.failures.report import described

__all__ = ["recording_errors", "write_error_file"]

_ECHO_DELAY_S = 2
"""Torchrun takes the earliest error for the cause, in whole seconds, and stamps processes without a file when it finds
them. An error that has another one for its cause is dated later by this."""


def write_error_file(error: BaseException, *, is_echo: bool = False) -> None:
    """Write an error where torchrun looks for it, unless one is there; elsewhere do nothing. Raises nothing.

    Args:
        error: What was raised.
        is_echo: Whether another rank has failed before.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not name or Path(name).exists():
        return
    text = described(error)
    message = {
        "message": text,
        "extraInfo": {
            # What a collective was called by leads nowhere, and hides the cause where many ranks are listed.
            "py_callstack": text if is_echo else "".join(traceback.format_exception(error)),
            "timestamp": str(int(time.time()) + (_ECHO_DELAY_S if is_echo else 0)),
        },
    }
    # The job is failing as it is: what goes wrong here must not hide why.
    with contextlib.suppress(OSError):
        Path(name).write_text(json.dumps({"message": message}))


@contextlib.contextmanager
def recording_errors() -> Generator[None]:
    """Write what the block raises to the error file of torchelastic."""
    try:
        yield
    except BaseException as error:
        write_error_file(error)
        raise
