"""Stream a model state through a mapper, one group after another.

[Note: order of reading]
Files are mapped, so that any tensor can be read at any time, and nothing is gained by reading one before all that its group
needs can be. So no tensor ever waits in memory: groups are run in the order of the files, each when the last of its inputs
comes up there, and only then are its inputs read, those in earlier files too. What is alive is one group. The order depends on
the files and the names alone, so it is the same on all ranks.
"""

import dataclasses
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from tqdm import tqdm

from d9d.core.placement import local_tensor
from d9d.model_state.io.progress import progress_bar
from d9d.model_state.io.source import ModelStateSource, TensorInfo, open_model_state
from d9d.model_state.mapper.base import ModelStateMapper, StateGroup, runnable_groups
from d9d.model_state.mapper.check import check_outputs
from d9d.model_state.mapper.names import NearestNames, listed
from d9d.model_state.mapper.pieces import TensorPieces
from d9d.model_state.mapper_reference import describe_with_place

__all__ = [
    "Described",
    "Foreseen",
    "ReadableGroup",
    "apply_group",
    "foresee_group",
    "missing_text",
    "order_groups",
    "read_inputs",
    "read_model_state",
    "stream_groups",
]


@dataclasses.dataclass(frozen=True, slots=True)
class ReadableGroup:
    """A group all of whose inputs are in the source.

    Attributes:
        group: The group.
        inputs: Those of its inputs that the source has, in the order of the files.
        num_bytes: What they take.
    """

    group: StateGroup
    inputs: tuple[str, ...]
    num_bytes: int


class Described(Protocol):
    """What has the shape and the dtype of a tensor, such as the tensor itself."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Foreseen:
    """What a group makes of its inputs, as far as that shows without their data.

    Attributes:
        outputs: By name, what has the shapes and dtypes of the outputs; nothing if the mapper looks at values.
        pieces: What the outputs are made of; None if the mapper cannot tell, and must be run on whole inputs.
    """

    outputs: "Mapping[str, TensorPieces | torch.Tensor]"
    pieces: Mapping[str, TensorPieces] | None


def read_model_state(
    src_dir: Path | str,
    mapper: ModelStateMapper,
    device: str | torch.device,
    show_progress: bool = True,
    position: int | None = None,
    *,
    cache_root: Path | None = None,
    verify: bool = True,
    allow_bin: bool = False,
) -> Iterable[tuple[str, torch.Tensor]]:
    """Read the tensors that a mapper needs and return what it makes of them, one after another, in full.

    Checks everything but the data at once; reads while the result is iterated over. Memory: one group of the mapper. No
    communication, unless the mapper has some; the order is the same on all ranks. See [Note: order of reading].

    Args:
        src_dir: See `open_model_state`.
        mapper: Translates from the layout on disk.
        device: Where the mapper works and its outputs are.
        show_progress: Whether to show a bar of bytes on rank 0.
        position: Line of the bar, among several.
        cache_root: See `open_model_state`.
        verify: See there.
        allow_bin: See there.

    Returns:
        Names and tensors, to be iterated over once. The tensors are the caller's own.

    Raises:
        FileNotFoundError: If there is nothing at the path.
        ValueError: If the model state is broken, or lacks tensors that the mapper needs.
    """
    source = open_model_state(src_dir, cache_root=cache_root, verify=verify, allow_bin=allow_bin)
    groups, lacking = runnable_groups(mapper, source.tensors)
    if lacking:
        names = {name for names in lacking.values() for name in names}
        source.close()
        raise ValueError(
            f"The model state in {src_dir} lacks what the mapper reads: {missing_text(names, source.tensors)}"
        )
    ordered = order_groups(groups, source.tensors)
    bar = progress_bar(sum(group.num_bytes for group in ordered), "B", "reading", show_progress, position)
    return stream_groups(source, mapper, ordered, torch.device(device), bar)


def missing_text(names: Collection[str], tensors: Collection[str]) -> str:
    """Say which tensors a source lacks."""
    return (
        f"{len(names)} tensors are not in it: {NearestNames(tensors).described(names)}. A mapper names those that may be "
        f"missing in optional_inputs."
    )


def order_groups(groups: Iterable[StateGroup], tensors: Mapping[str, TensorInfo]) -> list[ReadableGroup]:
    """Return groups in the order in which their last inputs come up in the files. See [Note: order of reading]."""
    positions = {name: position for position, name in enumerate(tensors)}
    keyed: list[tuple[tuple[int, list[str]], ReadableGroup]] = []
    for group in groups:
        inputs = sorted((name for name in group.inputs if name in positions), key=positions.__getitem__)
        num_bytes = sum(tensors[name].num_bytes for name in inputs)
        last = positions[inputs[-1]] if inputs else -1
        keyed.append(((last, sorted(group.outputs)), ReadableGroup(group, tuple(inputs), num_bytes)))
    return [group for _, group in sorted(keyed, key=lambda pair: pair[0])]


def read_inputs(source: ModelStateSource, group: ReadableGroup, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the inputs of a group on a device; on the CPU they may be views of the mapped files."""
    return {name: source.read(name).to(device) for name in group.inputs}


@torch.no_grad()
def apply_group(
    mapper: ModelStateMapper, group: StateGroup, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return what a mapper makes of the inputs of a group.

    Raises:
        ValueError: If the mapper refuses them, or returns something else than the outputs that it has declared.
        RuntimeError: If it fails otherwise. Both name the group.
    """
    try:
        outputs = mapper.apply(inputs)
    except ValueError as error:
        raise ValueError(_failure(group, error)) from error
    except Exception as error:
        raise RuntimeError(_failure(group, error)) from error
    check_outputs(mapper, group, outputs)
    return outputs


def foresee_group(mapper: ModelStateMapper, group: StateGroup, inputs: Mapping[str, "Described"]) -> Foreseen:
    """Find out what a group makes of its inputs, without their data.

    Args:
        mapper: The mapper.
        group: One of its groups.
        inputs: What is known of the inputs that there are, by name.

    Raises:
        ValueError: If the mapper refuses the inputs, fails, or makes something else than it has declared. Names the group.
    """
    try:
        pieces = mapper.trace(
            {name: TensorPieces.whole(name, known.shape, known.dtype) for name, known in inputs.items()}
        )
    except Exception as error:
        raise ValueError(_failure(group, error)) from error
    if pieces is not None:
        check_outputs(mapper, group, pieces)
        return Foreseen(pieces, pieces)
    try:
        with torch.no_grad():
            outputs = mapper.apply(
                {name: torch.empty(known.shape, dtype=known.dtype, device="meta") for name, known in inputs.items()}
            )
    except (RuntimeError, TypeError):
        # Torch's own errors where a mapper looks at values, which there are none of. Running the group tells what is wrong.
        return Foreseen({}, None)
    except Exception as error:
        raise ValueError(_failure(group, error)) from error
    check_outputs(mapper, group, outputs)
    return Foreseen(outputs, None)


def _failure(group: StateGroup, error: Exception) -> str:
    # What is no refusal is a mistake in somebody's code, whose place helps.
    reason = str(error) if isinstance(error, (ValueError, IndexError)) else describe_with_place(error)
    return f"{listed(group.inputs)} cannot be mapped to {listed(group.outputs)}: {reason}"


def stream_groups(
    source: ModelStateSource,
    mapper: ModelStateMapper,
    groups: Iterable[ReadableGroup],
    device: torch.device,
    bar: "tqdm[NoReturn]",
) -> Generator[tuple[str, torch.Tensor]]:
    """Yield the outputs of groups in turn; close the source in the end."""
    with source, bar:
        for group in groups:
            yield from _own_outputs(source, mapper, group, device)
            bar.update(group.num_bytes)


def _own_outputs(
    source: ModelStateSource, mapper: ModelStateMapper, group: ReadableGroup, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the outputs of a group, copied where they would keep inputs, or the mapped file, alive."""
    inputs = read_inputs(source, group, device)
    input_memory = {_memory(tensor) for tensor in inputs.values()}
    outputs = apply_group(mapper, group.group, inputs)
    del inputs
    for name in sorted(outputs):
        # No variable here: it would keep the output alive that a copy was made of.
        yield name, _owned(outputs.pop(name), input_memory if device.type == "cpu" else ())


def _owned(tensor: torch.Tensor, mapped: Collection[int]) -> torch.Tensor:
    """Return a tensor that holds on to no more than its elements."""
    local = local_tensor(tensor)
    is_part = local.untyped_storage().nbytes() > local.nbytes
    return tensor.clone(memory_format=torch.contiguous_format) if is_part or _memory(local) in mapped else tensor


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
