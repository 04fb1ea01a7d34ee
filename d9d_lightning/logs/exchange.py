"""Takes the log calls of a pack from the last stage to the other ranks of a pipeline.

[Note: one broadcast per step]
What changes from step to step are numbers and small tensors. The rest (names, arguments, dtypes) is a schema, which the
source sends once, as text, and which has a number from then on. A step then takes one broadcast of a header: the number
of its schema, and the values. Headers are as long as the longest of the known schemas needs, so that any may come next.

On an accelerator the header stays on the host, where the receivers need it, and tensors follow by a broadcast on the
device. Neither waits for the device: who read the number of the schema from there would wait for the backward pass.
"""
# Metrics keep the state that travels to themselves
# pyright: reportPrivateUsage=false

import json
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torchmetrics import Metric

from d9d.core.device import accumulator_dtype
from d9d.core.dist_ops import all_gather_object
from d9d_lightning.logs.merge import Scalar
from d9d_lightning.logs.replay import LogEntry, LogOptions

_NEW = -1
"""Begins the header of a schema that follows as text, whose length is in the second element."""
_FAILED = -2
"""Begins the header of an error that follows as text, whose length is in the second element."""

_FIRST_CAPACITY = 64
"""Elements of the first headers. It does for tens of keys; larger schemas make room for themselves."""

_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (NotImplementedError, ValueError, TypeError, RuntimeError)
}

_Items = list[Scalar | None]
_Take = Callable[[], Sequence[LogEntry]]


class LogExchange:
    """Gives all ranks of a pipeline the log entries and the losses of its last stage."""

    def __init__(self, module: LightningModule, group: dist.ProcessGroup, source: int, device: torch.device) -> None:
        """Know no schema yet.

        Args:
            module: The module, with the same metrics on all ranks.
            group: The ranks of one pipeline; it must take tensors on the host, too.
            source: Rank within the group that runs the user's step.
            device: Where tensors are sent from and arrive.
        """
        self._module = module
        self._group = group
        self._source = source
        self._device = device
        self._is_on_host = device.type == "cpu"
        self._capacity = _FIRST_CAPACITY
        self._layouts: list[_Layout] = []
        self._ids: dict[_Schema, int] = {}

    @torch.no_grad()
    def share(
        self, take: _Take | None, values: Sequence[torch.Tensor] | None
    ) -> tuple[list[LogEntry], list[torch.Tensor]]:
        """Return the entries and values of the source, equal to the bit on all ranks.

        All ranks of the group must call it. The metrics of the other ranks get the step value and the number of updates
        of the source's; their states stay as they are. Blocks the hosts of the others until the source has called.

        Args:
            take: Returns what to log, on the source; metrics may be computed there. Ignored from the others.
            values: Further tensors, from the source. Ignored from the others.

        Returns:
            Entries and values; tensors are detached, on the device, in the dtype and shape of the source's.

        Raises:
            NotImplementedError: For a ``sync_dist_group``. As all failures of the source, on all ranks; those of `take`, too.
            ValueError: If a rank cannot find a metric, or the step value of one is no tensor; on all ranks.
        """
        is_source = self._group.rank() == self._source
        layout, header, elements = self._send(take, values) if is_source else self._receive()
        numbers = header[1 : 1 + layout.num_numbers].tolist()
        items = iter(layout.unpack(numbers, elements))
        shared = [self._read_entry(row, items, is_source) for row in layout.schema.rows]
        return shared, cast("list[torch.Tensor]", list(items))

    def _send(
        self, take: _Take | None, values: Sequence[torch.Tensor] | None
    ) -> "tuple[_Layout, torch.Tensor, torch.Tensor]":
        try:
            schema, numbers, elements = self._pack(take, values)
            text = None if schema in self._ids else _encode(schema)
        except Exception as error:
            name, message = type(error).__name__, str(error)
            self._announce(_FAILED, json.dumps([name, message]))
            raise _error(name, message) from error
        if text is not None:
            self._announce(_NEW, text)
            self._learn(schema)
        index = self._ids[schema]
        layout = self._layouts[index]
        header = torch.zeros(self._capacity, dtype=torch.float64)
        header[: 1 + len(numbers)] = torch.tensor([index, *numbers], dtype=torch.float64)
        if self._is_on_host:
            header[1 + len(numbers) : 1 + len(numbers) + len(elements)] = elements
        self._broadcast(header)
        if not self._is_on_host and layout.num_elements:
            self._broadcast(elements)
        return layout, header, elements

    def _receive(self) -> "tuple[_Layout, torch.Tensor, torch.Tensor]":
        header = self._broadcast(torch.empty(self._capacity, dtype=torch.float64))
        if header[0] < 0:
            code, num_bytes = (int(element) for element in header[:2])
            text = bytes(self._broadcast(torch.empty(num_bytes, dtype=torch.uint8)).tolist()).decode()
            if code == _FAILED:
                raise _error(*json.loads(text))
            self._learn(_decode(text))
            header = self._broadcast(torch.empty(self._capacity, dtype=torch.float64))
        layout = self._layouts[int(header[0])]
        if self._is_on_host:
            start = 1 + layout.num_numbers
            return layout, header, header[start : start + layout.num_elements]
        elements = torch.empty(layout.num_elements, dtype=accumulator_dtype(self._device), device=self._device)
        return layout, header, self._broadcast(elements) if layout.num_elements else elements

    def _announce(self, code: int, text: str) -> None:
        encoded = text.encode()
        header = torch.zeros(self._capacity, dtype=torch.float64)
        header[0], header[1] = code, len(encoded)
        self._broadcast(header)
        self._broadcast(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))

    def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, group=self._group, group_src=self._source)
        return tensor

    def _learn(self, schema: "_Schema") -> None:
        """Number a schema. All ranks call it; with metrics they agree on whether they have them."""
        paths = [cast("str", row.options.metric_attribute) for row in schema.rows if row.is_metric]
        if paths:
            missing = [path for path in paths if _metric_at(self._module, path) is None]
            found = all_gather_object(missing, self._group)
            problems = [
                f"rank {rank} of the pipeline lacks {', '.join(names)}" for rank, names in enumerate(found) if names
            ]
            if problems:
                raise ValueError(
                    f"Metrics that the last pipeline stage logs must be in the module on all ranks, under their "
                    f"metric_attribute, but {'; '.join(problems)}. Create them in __init__."
                )
        layout = _Layout(schema)
        self._ids[schema] = len(self._layouts)
        self._layouts.append(layout)
        self._capacity = max(self._capacity, 2 + layout.num_numbers + (layout.num_elements if self._is_on_host else 0))

    def _pack(
        self, take: _Take | None, values: Sequence[torch.Tensor] | None
    ) -> "tuple[_Schema, list[float], torch.Tensor]":
        if take is None or values is None:
            raise ValueError("the rank that runs the user's step must pass its log entries and values")
        rows: list[_Row] = []
        items: _Items = []
        for entry in take():
            row_items = self._items_of(entry)
            slots = tuple(map(_slot_of, row_items))
            rows.append(_Row(entry.name, entry.options, entry.shows_step, isinstance(entry.value, Metric), slots))
            items += row_items
        schema = _Schema(tuple(rows), tuple(map(_slot_of, values)))
        items += values
        numbers = [float(item) for item in items if item is not None and not isinstance(item, torch.Tensor)]
        return schema, numbers, self._join([item for item in items if isinstance(item, torch.Tensor)])

    def _items_of(self, entry: LogEntry) -> _Items:
        """Return what changes from step to step in an entry; `_read_entry` reads it in the same order."""
        if not isinstance(entry.name, str):  # pyright: ignore[reportUnnecessaryIsInstance]  # users may pass anything
            raise TypeError(f"self.log({entry.name!r}, ...): with pipelines the name must be a string.")
        if entry.options.sync_dist_group is not None:
            raise NotImplementedError(
                f"self.log({entry.name!r}, ..., sync_dist_group=...): with pipelines a group cannot be given, as the call "
                f"is repeated on the ranks of all stages. Leave it out: the data-parallel ranks are the default."
            )
        if not isinstance(entry.value, Metric):
            return [entry.value, entry.batch_size]
        metric = entry.value
        if _metric_at(self._module, cast("str", entry.options.metric_attribute)) is not metric:
            raise ValueError(
                f"self.log({entry.name!r}, metric, metric_attribute={entry.options.metric_attribute!r}): with pipelines "
                f"metric_attribute must be the path of this metric in the module. Leave it out, and it is found."
            )
        step_value = metric._forward_cache if entry.shows_step else None
        if not isinstance(step_value, torch.Tensor | None):
            raise ValueError(
                f"self.log({entry.name!r}, metric): the value of a step must be a tensor, but that of "
                f"{type(metric).__name__} is a {type(step_value).__name__}. Log its parts, or set on_step=False."
            )
        return [step_value, metric._update_count, metric._computed is not None, entry.batch_size]

    def _join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        dtype = accumulator_dtype(self._device)
        parts = [tensor.detach().to(self._device).reshape(-1) for tensor in tensors]
        if not parts:
            return torch.empty(0, dtype=dtype, device=self._device)
        if len({part.dtype for part in parts}) > 1:
            parts = [part.to(dtype) for part in parts]
        return torch.cat(parts).to(dtype)

    def _read_entry(self, row: "_Row", items: "Iterator[Scalar | None]", is_source: bool) -> LogEntry:
        value: Scalar | Metric | None = next(items)
        if row.is_metric:
            step_value = value
            value = metric = cast("Metric", self._module.get_submodule(cast("str", row.options.metric_attribute)))
            num_updates, is_computed = cast("int", next(items)), next(items)
            if not is_source:
                metric._update_count = num_updates
                if row.shows_step:
                    metric._forward_cache = step_value
                if not is_computed:
                    # Who still had the value of an earlier epoch would not take part when the others compute.
                    metric._computed = None
        return LogEntry(
            name=row.name,
            value=cast("Scalar | Metric", value),
            batch_size=next(items),
            shows_step=row.shows_step,
            options=row.options,
        )


class _Slot(NamedTuple):
    """Where an item travels: as nothing ("none"), among the numbers ("int", "float"), or as a tensor of a dtype."""

    kind: str
    shape: tuple[int, ...] = ()


class _Row(NamedTuple):
    name: str
    options: LogOptions
    shows_step: bool
    is_metric: bool
    slots: tuple[_Slot, ...]


class _Schema(NamedTuple):
    rows: tuple[_Row, ...]
    values: tuple[_Slot, ...]


class _Layout:
    """The places of a schema's items among numbers and elements."""

    def __init__(self, schema: _Schema) -> None:
        self.schema = schema
        self._slots = [slot for row in schema.rows for slot in row.slots] + list(schema.values)
        self._sizes = [torch.Size(slot.shape).numel() for slot in self._slots if slot.kind in _DTYPES]
        self.num_numbers = sum(slot.kind in ("int", "float") for slot in self._slots)
        self.num_elements = sum(self._sizes)

    def unpack(self, numbers: Sequence[float], elements: torch.Tensor) -> _Items:
        """Return the items in the order of the slots. Tensors share memory with others of their dtype."""
        next_number = iter(numbers)
        tensors_by_dtype: dict[torch.dtype, tuple[torch.Tensor, ...]] = {}
        num_tensors = 0
        items: _Items = []
        for kind, shape in self._slots:
            dtype = _DTYPES.get(kind)
            if dtype is not None:
                if dtype not in tensors_by_dtype:
                    tensors_by_dtype[dtype] = elements.to(dtype).split(self._sizes)
                items.append(tensors_by_dtype[dtype][num_tensors].reshape(shape))
                num_tensors += 1
            elif kind == "none":
                items.append(None)
            else:
                number = next(next_number)
                items.append(int(number) if kind == "int" else number)
        return items


def _slot_of(item: Scalar | None) -> _Slot:
    if isinstance(item, torch.Tensor):
        return _Slot(_DTYPE_NAMES[item.dtype], tuple(item.shape))
    if item is None:
        return _Slot("none")
    return _Slot("int" if isinstance(item, int) else "float")


def _metric_at(module: LightningModule, path: str) -> Metric | None:
    try:
        found = module.get_submodule(path)
    except AttributeError:
        return None
    return found if isinstance(found, Metric) else None


def _encode(schema: _Schema) -> str:
    return json.dumps(schema, default=_refuse_to_encode)


def _refuse_to_encode(argument: object) -> str:
    raise TypeError(
        f"an argument of self.log is a {type(argument).__name__}, which cannot be sent to the other pipeline stages. "
        f"Pass bool, str or None."
    )


def _decode(text: str) -> _Schema:
    rows, values = json.loads(text)
    return _Schema(
        tuple(
            _Row(name, LogOptions(*options), shows_step, is_metric, tuple(map(_decode_slot, slots)))
            for name, options, shows_step, is_metric, slots in rows
        ),
        tuple(map(_decode_slot, values)),
    )


def _decode_slot(slot: "list[str | list[int]]") -> _Slot:
    kind, shape = slot
    return _Slot(cast("str", kind), tuple(cast("list[int]", shape)))


def _error(name: str, message: str) -> Exception:
    """Return the same error on all ranks, of a type that all of them know."""
    return _ERRORS[name](message) if name in _ERRORS else RuntimeError(f"{name}: {message}")
