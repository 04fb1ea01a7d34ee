"""Fill a model from a model state: each rank reads what its shards are made of, straight into their memory.

[Note: all or nothing]
Everything that can be known without the data of the model state is checked first, in one error. Then comes what depends on
values: mappers that look at them, tied parameters, and conversions to dtypes of a much narrower range are tried in advance,
for which these tensors are read twice. Only then is the model written to. What can fail afterwards is reading itself, and the
check of [Note: ranges of dtypes]; the model then holds a mixture, and the error says so.

[Note: ranges of dtypes]
What is finite must not become infinite in the dtype of the model. For float16 that is found in advance. bfloat16 ends half a
percent below float32; next to nothing lies in between but the lowest number that float32 has, as in masks. It is not worth
reading everything twice, so it is found when it is there.
"""

import contextlib
import dataclasses
import itertools
import math
import operator
import warnings
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from tqdm import tqdm

from d9d.core.participants import Participants
from d9d.core.placement import local_tensor
from d9d.model_state.io.boxes import local_boxes
from d9d.model_state.io.load_plan import LoadPlan, PlannedGroup, check_output, plan_load
from d9d.model_state.io.model_tensors import Kept
from d9d.model_state.io.progress import progress_bar
from d9d.model_state.io.reader import apply_group, read_inputs
from d9d.model_state.io.source import ModelStateSource, open_model_state
from d9d.model_state.mapper.base import ModelStateMapper
from d9d.model_state.mapper.names import listed
from d9d.model_state.mapper.pieces import Box, TensorPieces
from d9d.model_state.problems import raise_problems

__all__ = ["LoadMode", "fill_model", "load_model_state"]

_CHUNK_ELEMENTS = 2 * 2**20
"""Most that is held at once where values cannot go straight to their place: 16 MiB of numbers of 8 bytes."""

LoadMode: TypeAlias = Literal["each", "broadcast"]
"""Who reads a shard that several ranks hold: each of them, or one for all."""


def load_model_state(
    src_dir: Path | str,
    mapper: ModelStateMapper,
    device: str | torch.device,
    model: nn.Module,
    show_progress: bool = True,
    position: int | None = None,
    *,
    load_mode: LoadMode = "each",
    keep: Sequence[str] = (),
    keep_option: str = "keep",
    expected: Collection[str] = (),
    process_group: dist.ProcessGroup | None = None,
    cache_root: Path | None = None,
    verify: bool = True,
    allow_bin: bool = False,
) -> None:
    """Fill all parameters and persistent buffers of a model.

    Of a `DTensor`, only the shard of this rank is read, where the mapper can tell what it is made of
    (`ModelStateMapper.trace`); other mappers run on whole inputs. Gradients and ``requires_grad`` stay as they are, and so do
    buffers that are not persistent: whoever builds the model computes them.

    Values are converted between floating-point dtypes, and refused if one is out of the model's range; see
    [Note: ranges of dtypes]. Other conversions must be stated by `ModelStateMapperCast`, which does as it is told: what it
    takes out of a range becomes infinite.

    Without `process_group` there is no communication with the load mode "each". Otherwise all ranks of the group must call
    this, with the same model state, and fail together; blocks the host.

    Args:
        src_dir: See `open_model_state`.
        mapper: Translates from the layout on disk to the names of ``model.state_dict()``.
        device: Where mappers without a trace work.
        model: The model, already on its device, and distributed if it shall be.
        show_progress: Whether to show a bar of bytes on rank 0.
        position: Line of the bar, among several.
        load_mode: "each": every rank reads. "broadcast": of ranks that hold the same shard, one reads and sends it to the
            others, which pays off where storage is slower than the network. Plain tensors are read by every rank, and
            mappers without a trace, which may communicate themselves, run on every rank.
        keep: Patterns (`fnmatch`) of names that stay as they are; each must match one. Every other parameter, and every
            other persistent buffer, must be produced by the mapper.
        keep_option: What messages call `keep`: the name of the setting that it comes from.
        expected: Tensors of the model state that the mapper need not read, as another one does. Rank 0 warns of all further
            ones: weights that are left out without a word make another model. `ModelStateMapperDrop` says that it is meant.
        process_group: The ranks that fail together. None: all ranks for "broadcast", this one alone for "each".
        cache_root: See `open_model_state`.
        verify: See there. Every rank compares all files.
        allow_bin: See there.

    Raises:
        FileNotFoundError: If there is nothing at the path.
        ValueError: If the model state is broken, or does not fit the model; with all reasons. The model is unchanged.
        RuntimeError: If reading failed in the middle: the model is then partly loaded and must not be used. Or if another
            rank of the group failed.
    """
    if load_mode not in ("each", "broadcast"):
        raise ValueError(f'load_mode must be "each" or "broadcast", got {load_mode!r}.')
    group = process_group
    if load_mode == "broadcast" and group is None and dist.is_initialized():
        group = dist.group.WORLD
    with contextlib.ExitStack() as stack:
        with _participants(group).failing_together():
            source = stack.enter_context(
                open_model_state(src_dir, cache_root=cache_root, verify=verify, allow_bin=allow_bin)
            )
            what = f"The model state in {src_dir}, for this model,"
            plan = plan_load(source, mapper, model, Kept(keep, keep_option), what)
            _warn_of_unread(src_dir, source, mapper, expected)
        fill_model(
            source,
            mapper,
            torch.device(device),
            plan,
            group=group,
            is_broadcast=load_mode == "broadcast",
            bar=(show_progress, position),
        )


@torch.no_grad()
def fill_model(
    source: ModelStateSource,
    mapper: ModelStateMapper,
    device: torch.device,
    plan: LoadPlan,
    *,
    group: dist.ProcessGroup | None = None,
    is_broadcast: bool = False,
    bar: tuple[bool, int | None] = (False, None),
) -> None:
    """Do what a plan says. See `load_model_state`.

    Args:
        source: The model state.
        mapper: Of the plan.
        device: Where mappers without a trace work.
        plan: The plan.
        group: Ranks that fail together; all must call this.
        is_broadcast: Whether one of the ranks that hold the same reads for the others.
        bar: Whether to show a bar, and its line.
    """
    filler = _Filler(source, mapper, device, is_broadcast)
    participants = _participants(group)
    with participants.failing_together():
        filler.rehearse(plan.groups)
    with participants.failing_together(), _partly_loaded():
        total = sum(planned.readable.num_bytes for planned in plan.groups)
        with progress_bar(total, "B", "loading", *bar) as shown:
            filler.fill(plan.groups, shown)
    if is_broadcast and group is not None:
        # Other groups have run on all ranks.
        sent = {name for planned in plan.groups if planned.foreseen.pieces is not None for name in planned.filled}
        for target in plan.targets:
            if not sent.isdisjoint(target.names):
                _broadcast(target.tensor)


class _Filler:
    """Reads what the targets of one rank are made of."""

    def __init__(
        self, source: ModelStateSource, mapper: ModelStateMapper, device: torch.device, is_broadcast: bool
    ) -> None:
        self._source = source
        self._mapper = mapper
        self._device = device
        self._is_broadcast = is_broadcast

    def rehearse(self, groups: Sequence[PlannedGroup]) -> None:
        """Check what only the data can tell: outputs that could not be foreseen, ties and ranges.

        Raises:
            ValueError: If anything of that does not fit.
            RuntimeError: If a mapper fails.
        """
        makers = {name: planned for planned in groups for name in planned.targets}
        problems: list[str] = []
        for planned in groups:
            problems += self._problems_of_range(planned)
            for name, other in planned.compared.items():
                self._compare(planned, name, makers[other], other)
        raise_problems("The model state, in the dtypes of this model,", problems)

    def _problems_of_range(self, planned: PlannedGroup) -> list[str]:
        """Report values that do not fit, and run a group to see what it makes if that could not be foreseen."""

        def narrowed(outputs: "Mapping[str, TensorPieces | torch.Tensor]") -> list[str]:
            return [
                name
                for name, target in planned.filled.items()
                if name in outputs and _has_much_narrower_range(outputs[name].dtype, target.tensor.dtype)
            ]

        outputs, is_traced = planned.foreseen.outputs, planned.foreseen.pieces is not None
        if not is_traced and (not outputs or narrowed(outputs)):
            outputs = self._apply(planned)
        problems: list[str] = []
        for name in narrowed(outputs):
            target = planned.targets[name].tensor
            if not is_traced or self._is_read_here(target):
                problems += _out_of_range(name, self._reader_of(outputs[name]), target)
        return problems

    def fill(self, groups: Iterable[PlannedGroup], bar: "tqdm[NoReturn]") -> None:
        """Write all targets that this rank reads, and what mappers without a trace make."""
        for planned in groups:
            if planned.foreseen.pieces is not None:
                for name, target in planned.filled.items():
                    if self._is_read_here(target.tensor):
                        self._fill_from_pieces(planned.foreseen.pieces[name], target.tensor)
                        self._check_filled(name, planned, planned.foreseen.pieces[name])
            elif planned.filled:
                outputs = self._apply(planned)
                for name, target in planned.filled.items():
                    _copy_shard(outputs[name], target.tensor)
                    self._check_filled(name, planned, outputs.pop(name))
            bar.update(planned.readable.num_bytes)

    def _check_filled(self, name: str, planned: PlannedGroup, output: "TensorPieces | torch.Tensor") -> None:
        """Raise ValueError if a target has got infinite values of finite ones. See [Note: ranges of dtypes]."""
        tensor = planned.targets[name].tensor
        local = local_tensor(tensor)
        if not _has_narrower_range(output.dtype, local.dtype):
            return
        if all(bool(local[chunk.slices].isfinite().all()) for chunk in _chunks(Box.whole(tuple(local.shape)))):
            return
        raise_problems("The model state", list(_out_of_range(name, self._reader_of(output), tensor)))

    def _is_read_here(self, tensor: torch.Tensor) -> bool:
        if not self._is_broadcast or not isinstance(tensor, DTensor):
            return True
        coordinate = tensor.device_mesh.get_coordinate()
        return coordinate is not None and not any(coordinate[dim] for dim in _replicated_dims(tensor))

    def _fill_from_pieces(self, pieces: TensorPieces, tensor: torch.Tensor) -> None:
        local = local_tensor(tensor)
        # On the CPU values are read from the mapped file to their place, and converted on the way.
        is_direct = local.device.type == "cpu" and not any(piece.dtypes for piece in pieces.pieces)
        for part in local_boxes(tensor):
            target = local[part.local.slices]
            if is_direct:
                pieces.fill(target, part.box, self._source.read)
                continue
            for chunk in _chunks(Box.whole(part.box.shape)):
                start = tuple(map(operator.add, part.box.start, chunk.start))
                pieces.fill(target[chunk.slices], Box(start, chunk.shape), self._source.read)

    def _apply(self, planned: PlannedGroup) -> dict[str, torch.Tensor]:
        """Run the mapper on whole inputs, and return the outputs that have a target."""
        inputs = read_inputs(self._source, planned.readable, self._device)
        outputs = apply_group(self._mapper, planned.readable.group, inputs)
        for name, target in planned.targets.items():
            check_output(name, outputs[name], target.tensor)
        return {name: outputs[name] for name in planned.targets}

    def _reader_of(self, output: "TensorPieces | torch.Tensor") -> "_PieceReader | _OutputReader":
        return _PieceReader(output, self._source) if isinstance(output, TensorPieces) else _OutputReader(output)

    def _compare(self, planned: PlannedGroup, name: str, other_planned: PlannedGroup, other: str) -> None:
        """Raise ValueError if two outputs for one target differ. Reads both in full, so that all ranks find the same."""
        target = planned.targets[name].tensor
        first, second = self._reader(planned, name), self._reader(other_planned, other)
        if first == second:
            return
        for chunk in _chunks(Box.whole(tuple(target.shape))):
            values = [torch.empty(chunk.shape, dtype=target.dtype) for _ in range(2)]
            for value, reader in zip(values, (first, second), strict=True):
                reader(value, chunk)
            if not torch.equal(_as_bytes(values[0]), _as_bytes(values[1])):
                raise ValueError(
                    f"{name!r} and {other!r} are one parameter of the model (tied), but the model state has different values "
                    f"for them. Leave one of them out of the mapper if its values do not matter, or untie the model."
                )

    def _reader(self, planned: PlannedGroup, name: str) -> "_PieceReader | _OutputReader":
        if planned.foreseen.pieces is not None:
            return self._reader_of(planned.foreseen.pieces[name])
        output = self._apply(planned)[name]
        if isinstance(output, DTensor):
            raise ValueError(
                f"{name!r} is the same parameter as another output (tied), and the mapper distributes it, so that they "
                f"cannot be compared. Leave the distribution to load_model_state."
            )
        return self._reader_of(output)


@dataclasses.dataclass(frozen=True, slots=True)
class _PieceReader:
    """Copies boxes of an output that is known in pieces."""

    pieces: TensorPieces
    source: ModelStateSource

    @property
    def is_local(self) -> bool:
        return False

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces.dtype

    def __call__(self, values: torch.Tensor, box: Box) -> None:
        self.pieces.fill(values, box, self.source.read)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _OutputReader:
    """Copies boxes of an output that has been made."""

    output: torch.Tensor

    @property
    def is_local(self) -> bool:
        """Whether boxes are those of the local tensor."""
        return isinstance(self.output, DTensor)

    @property
    def dtype(self) -> torch.dtype:
        return self.output.dtype

    def __call__(self, values: torch.Tensor, box: Box) -> None:
        values.copy_(local_tensor(self.output)[box.slices])


def _has_narrower_range(source: torch.dtype, target: torch.dtype, part: float = 1) -> bool:
    """Tell whether the largest number of a dtype is below that of another, or a part of it."""
    if not (source.is_floating_point and target.is_floating_point):
        return False
    return torch.finfo(target).max < part * torch.finfo(source).max


def _has_much_narrower_range(source: torch.dtype, target: torch.dtype) -> bool:
    return _has_narrower_range(source, target, 0.5)


def _out_of_range(name: str, reader: "_PieceReader | _OutputReader", target: torch.Tensor) -> Iterator[str]:
    """Report values of an output that are finite, and are not in the dtype of its target; those of this rank's shard."""
    lost: list[float] = []
    parts = local_boxes(target)
    boxes = [part.local if reader.is_local else part.box for part in parts]
    for chunk in itertools.chain.from_iterable(_chunks(box) for box in boxes):
        values = torch.empty(chunk.shape, dtype=reader.dtype)
        reader(values, chunk)
        found = values[values.isfinite() & ~values.to(target.dtype).isfinite()]
        if found.numel():
            lost.append(found.abs().max().item())
    if lost:
        yield (
            f"{name!r} is {reader.dtype} in the model state, with values up to {max(lost):.6g}, which would become infinite in "
            f"{target.dtype} in the model. Build the model in a dtype of a wider range, or clamp the values in a mapper."
        )


def _copy_shard(output: torch.Tensor, tensor: torch.Tensor) -> None:
    local = local_tensor(tensor)
    if isinstance(output, DTensor):
        local.copy_(local_tensor(output))
        return
    for part in local_boxes(tensor):
        local[part.local.slices].copy_(output[part.box.slices])


def _chunks(box: Box) -> Iterator[Box]:
    """Cut a box into parts of a bounded number of elements, along its first dimensions."""
    if math.prod(box.shape) <= _CHUNK_ELEMENTS:
        yield box
        return
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    half = box.shape[dim] // 2
    for offset, size in ((0, half), (half, box.shape[dim] - half)):
        start = (*box.start[:dim], box.start[dim] + offset, *box.start[dim + 1 :])
        yield from _chunks(Box(start, (*box.shape[:dim], size, *box.shape[dim + 1 :])))


def _replicated_dims(tensor: DTensor) -> list[int]:
    """Return the mesh dimensions along which several ranks hold the same."""
    return [
        dim
        for dim, placement in enumerate(tensor.placements)
        if isinstance(placement, Replicate) and tensor.device_mesh.size(dim) > 1
    ]


def _broadcast(tensor: torch.Tensor) -> None:
    """Send a shard from the rank that has read it to those that hold the same, one mesh dimension after another."""
    local = local_tensor(tensor)
    if not isinstance(tensor, DTensor) or local.numel() == 0:
        return
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return
    dims = _replicated_dims(tensor)
    for position, dim in enumerate(dims):
        # Those further along a later dimension get it by that one.
        if any(coordinate[later] for later in dims[position + 1 :]):
            continue
        sent = local.detach().contiguous()
        # As bytes, since backends differ in the dtypes that they take.
        dist.broadcast(_as_bytes(sent), group=tensor.device_mesh.get_group(dim), group_src=0)
        if sent.data_ptr() != local.data_ptr():
            local.copy_(sent)


def _warn_of_unread(
    src_dir: Path | str, source: ModelStateSource, mapper: ModelStateMapper, expected: Collection[str]
) -> None:
    read = {name for group in mapper.state_dependency_groups() for name in group.inputs}
    unread = source.tensors.keys() - read - set(expected)
    if unread and not (dist.is_initialized() and dist.get_rank()):
        warnings.warn(
            f"{len(unread)} tensors of the model state in {src_dir} are not read, so the model does without them: "
            f"{listed(unread)}. Map them, or name them in a ModelStateMapperDrop if that is meant.",
            stacklevel=3,
        )


def _participants(group: dist.ProcessGroup | None) -> Participants:
    return Participants([] if group is None else [group])


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@contextlib.contextmanager
def _partly_loaded() -> Generator[None]:
    """Say what state the model is in if the block fails."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"Reading the model state failed in the middle ({type(error).__name__}: {error}). The model is now partly loaded: "
            f"do not use it. Build it anew, or load again."
        ) from error
