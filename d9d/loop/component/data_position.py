"""Move a data stream to where the newest checkpoint of a run was, before anything expensive is built."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import filesystem, state_dict_loader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from d9d.core.dist_context import DistributedContext
from d9d.loop.component.checkpointer import STATE_KEY, find_newest_checkpoint, quiet_on_one_process
from d9d.loop.component.data_stream import DataParallelMicrobatchPackStream

__all__ = ["STREAM_KEY", "restore_data_position"]

STREAM_KEY = "microbatch_pack_stream"
"""Key of the data stream in a checkpoint."""


def restore_data_position(
    dist_context: DistributedContext,
    save_dir: Path,
    stream: DataParallelMicrobatchPackStream,
    refuse: Callable[[Collection[str]], None],
) -> None:
    """Refuse to resume on data that does not fit the newest checkpoint. All ranks must call it; blocks.

    [Note: the data position comes first]
    A stream whose position is the same on all ranks, in dicts of plain values, is moved there, too: how many steps are left
    may depend on the steps that were done. The whole checkpoint is loaded later and moves it to the same place once more.
    Other streams may take long to move, and ranks may come to different results, so of these only the keys are looked at.

    Args:
        dist_context: Topology of the job.
        save_dir: Folder of the checkpoints of the run; without a complete one, nothing happens.
        stream: Data stream of this rank.
        refuse: Raises if the job cannot resume from a checkpoint that holds these keys.

    Raises:
        ValueError: The saved position would mean other samples; names what has changed.
    """
    path = find_newest_checkpoint(dist_context, save_dir)
    if path is None:
        return
    metadata = filesystem.FileSystemReader(path).read_metadata()
    refuse([key.removeprefix(f"{STATE_KEY}.") for key in metadata.state_dict_metadata])
    # Any: a key of the checkpoint by the keys and indices that lead to it, as the planner of PyTorch keeps them.
    paths: dict[str, tuple[Any, ...]] = metadata.planner_data or {}
    entries = {key: path[2:] for key, path in paths.items() if path[:2] == (STATE_KEY, STREAM_KEY) and len(path) > 2}
    if not entries:
        # A stream that keeps nothing, or a checkpoint of something else: loading it says what is missing.
        return
    stream.refuse_other_ranks({path[0] for path in entries.values()})
    is_plain = all(
        isinstance(metadata.state_dict_metadata[key], BytesStorageMetadata)
        and all(isinstance(part, str) for part in path)
        for key, path in entries.items()
    )
    if not (is_plain and stream.has_rank_invariant_state):
        return
    # Any: state dicts hold what their owners choose.
    position: dict[str, Any] = {}
    for *parents, last in entries.values():
        node = position
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = None
    with quiet_on_one_process():
        state_dict_loader.load(
            {STATE_KEY: {STREAM_KEY: position}}, checkpoint_id=path, no_dist=not dist_context.is_distributed
        )
    stream.load_state_dict(position)
