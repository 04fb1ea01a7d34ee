"""Move a data stream to where the newest checkpoint of a run was, before anything expensive is built."""

from collections.abc import Callable, Collection

from d9d.checkpoint import Document, load_state, read_metadata
from d9d.loop.component.data_stream import DataParallelMicrobatchPackStream
from d9d.loop.component.run_checkpoints import STATE_KEY, RunCheckpoints

__all__ = ["STREAM_KEY", "restore_data_position"]

STREAM_KEY = "microbatch_pack_stream"
"""Key of the data stream in a checkpoint."""


def restore_data_position(
    checkpoints: RunCheckpoints,
    stream: DataParallelMicrobatchPackStream,
    refuse: Callable[[Collection[str]], None],
) -> None:
    """Refuse to resume on data that does not fit the newest checkpoint. All ranks must call it; blocks.

    [Note: the data position comes first]
    A stream whose position is the same on all ranks is moved there, too: how many steps are left may depend on the steps
    that were done. The whole checkpoint is loaded later and moves it to the same place once more. Other streams may take
    long to move, and ranks may come to different results, so of these only the keys are looked at.

    Args:
        checkpoints: Those of the run; without a complete one, nothing happens.
        stream: Data stream of this rank.
        refuse: Raises if the job cannot resume from a checkpoint that holds these keys.

    Raises:
        ValueError: The saved position would mean other samples; names what has changed.
    """
    saved = checkpoints.newest()
    if saved is None:
        return
    with checkpoints.participants.failing_together():
        keys = [key.removeprefix(f"{STATE_KEY}.") for key in read_metadata(saved.path).state_dict_metadata]
        refuse(keys)
        of_stream = {key.split(".")[1] for key in keys if key.startswith(f"{STREAM_KEY}.")}
        if of_stream:
            stream.refuse_other_ranks(of_stream)
    if not of_stream or not stream.has_rank_invariant_state:
        # A stream that keeps nothing, or a checkpoint of something else: loading it says what is missing.
        return
    wanted = {STATE_KEY: {STREAM_KEY: {key: Document(None) for key in of_stream}}}
    loaded = load_state(saved.path, wanted, checkpoints.group, may_be_left=lambda key: True)
    with checkpoints.participants.failing_together():
        stream.load_state_dict(loaded[STATE_KEY][STREAM_KEY])
