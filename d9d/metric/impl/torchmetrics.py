"""Any metric of torchmetrics, reduced over the right ranks."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist

from d9d.core.dist_ops import all_gather_object, all_gather_variadic_shape
from d9d.core.pytree import tree_leaves, tree_map_only
from d9d.core.types import TensorSpec
from d9d.metric.base import Metric

if TYPE_CHECKING:
    import torchmetrics

    from d9d.core.dist_context import DistributedContext

# A state is a tensor, or a list of tensors or of whatever the metric collects; a reduction takes either.
_State: TypeAlias = torch.Tensor | list[Any]
_Reduction: TypeAlias = Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _MetricState:
    """The states of one metric; a collection or wrapper has several metrics."""

    num_updates: int
    states: dict[str, Any]


class TorchMetricsMetric(Metric[Any]):
    """Wraps a metric or a collection of torchmetrics.

    [Note: reducing torchmetrics states]
    torchmetrics gathers one state after another over all ranks: peers that hold the same data are counted twice, and
    ranks that hold different numbers of list elements issue different numbers of collectives and hang. Here each rank
    packs all its states into one object and one row of bytes, whatever they hold, so that all ranks issue the same
    collectives. The gathered states are reduced as the metric asks, into a replica: the wrapped metric keeps the
    states of this rank only. Ranks without updates hold initial values, which do not take part.
    """

    def __init__(self, metric: "torchmetrics.Metric | torchmetrics.MetricCollection") -> None:
        """Wrap a metric, which from then on is updated through this object only."""
        self._local = metric
        self._replica = _new_replica(metric)
        self._is_synced = False

    @property
    def wrapped(self) -> "torchmetrics.Metric | torchmetrics.MetricCollection":
        """The wrapped metric, with the states of this rank."""
        return self._local

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Pass observations of this rank on."""
        self._is_synced = False
        self._local.update(*args, **kwargs)

    def sync(self, dist_context: "DistributedContext") -> None:
        """Gather all states over ``dist_context.data_group`` and reduce them. All ranks must call it; blocks the host.

        Raises:
            ValueError: If the ranks wrap different metrics; on all ranks.
        """
        local = _read_states(self._local)
        group = dist_context.data_group
        gathered = [local] if group is None else _gather_states(local, group, dist_context.current_device)
        for name, metric in _metrics_of(self._replica):
            _write_state(metric, _reduce([states[name] for states in gathered], _reductions_of(metric)))
        self._is_synced = True

    def compute(self) -> Any:  # noqa: ANN401 - collections compute dicts
        """Return what the metric computes, for all ranks as of `sync`, or for this rank if updated since."""
        if not self._is_synced:
            local = _read_states(self._local)
            for name, metric in _metrics_of(self._replica):
                _write_state(metric, local[name])
        return self._replica.compute()

    def reset(self) -> None:
        """Reset the wrapped metric."""
        self._local.reset()
        self._is_synced = False

    def to(self, device: str | torch.device | int) -> None:
        """Move all states to a device."""
        self._local.to(device)
        self._replica.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank as bytes: the lengths of lists differ from one save to another."""
        content = {
            name: {"num_updates": state.num_updates, "states": state.states}
            for name, state in _read_states(self._local).items()
        }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        return {"states": buffer.getvalue()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from states of this rank."""
        content = torch.load(io.BytesIO(state_dict["states"]), map_location="cpu", weights_only=True)
        for name, metric in _metrics_of(self._local):
            _write_state(metric, _MetricState(**content[name]))
        self._is_synced = False


def _metrics_of(
    root: "torchmetrics.Metric | torchmetrics.MetricCollection",
) -> Iterator[tuple[str, "torchmetrics.Metric"]]:
    """Yield the metric itself, or all metrics in the collection or wrapper, with their paths."""
    import torchmetrics

    for name, module in root.named_modules():
        if isinstance(module, torchmetrics.Metric):
            yield name, module


def _new_replica(
    metric: "torchmetrics.Metric | torchmetrics.MetricCollection",
) -> "torchmetrics.Metric | torchmetrics.MetricCollection":
    replica = deepcopy(metric)
    replica.reset()
    for _, part in _metrics_of(replica):
        # Otherwise `compute` would gather over all ranks what is gathered already.
        part.distributed_available_fn = _never
    return replica


def _never() -> bool:
    return False


def _reductions_of(metric: "torchmetrics.Metric") -> Mapping[str, _Reduction]:
    # torchmetrics has no public name for it; `Metric.add_state` documents the values.
    return cast("Mapping[str, _Reduction]", metric._reductions)  # pyright: ignore[reportPrivateUsage]


def _read_states(root: "torchmetrics.Metric | torchmetrics.MetricCollection") -> dict[str, _MetricState]:
    return {
        name: _MetricState(
            num_updates=metric.update_count,
            # Lists are copied, since the metric appends to them.
            states={
                key: list(value) if isinstance(value, list) else value for key, value in metric.metric_state.items()
            },
        )
        for name, metric in _metrics_of(root)
    }


def _write_state(metric: "torchmetrics.Metric", state: _MetricState) -> None:
    for name, value in state.states.items():
        # Copied, because some metrics change their states in `compute`, and all do in `update`.
        copied = tree_map_only(torch.Tensor, lambda tensor: tensor.to(metric.device, copy=True), value)
        setattr(metric, name, copied)  # introspection: torchmetrics keeps states as attributes
    metric._update_count = state.num_updates  # pyright: ignore[reportPrivateUsage]
    metric._computed = None  # pyright: ignore[reportPrivateUsage]


def _gather_states(
    local: dict[str, _MetricState], group: dist.ProcessGroup, device: torch.device
) -> list[dict[str, _MetricState]]:
    outlines = all_gather_object(tree_map_only(torch.Tensor, _spec_of, local), group)
    names = [[(path, sorted(state.states)) for path, state in outline.items()] for outline in outlines]
    if any(other != names[0] for other in names):
        raise ValueError(f"the ranks of the group wrap different metrics, with these states: {names}.")
    tensors = [leaf for leaf in tree_leaves(local) if isinstance(leaf, torch.Tensor)]
    content = [tensor.detach().to(device).contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    rows = all_gather_variadic_shape(
        torch.cat(content) if content else torch.empty(0, dtype=torch.uint8, device=device), group
    )
    return [_fill(outline, row) for outline, row in zip(outlines, rows, strict=True)]


def _spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype)


def _fill(outline: dict[str, _MetricState], content: torch.Tensor) -> dict[str, _MetricState]:
    """Put the tensors back where specs stand for them, in the order in which they were packed."""
    offset = 0

    def next_tensor(spec: TensorSpec) -> torch.Tensor:
        nonlocal offset
        num_bytes = torch.Size(spec.shape).numel() * spec.dtype.itemsize
        # The copy is aligned for the dtype, and does not keep the bytes of all ranks alive.
        taken = content[offset : offset + num_bytes].clone()
        offset += num_bytes
        return taken.view(spec.dtype).view(spec.shape)

    return tree_map_only(TensorSpec, next_tensor, outline)


def _reduce(gathered: Sequence[_MetricState], reductions: Mapping[str, _Reduction]) -> _MetricState:
    """Reduce the states of all ranks as torchmetrics documents for ``add_state``."""
    filled = [state for state in gathered if state.num_updates] or gathered[:1]
    if len(filled) == 1:
        return filled[0]
    return _MetricState(
        num_updates=sum(state.num_updates for state in filled),
        states={
            name: _reduce_one([state.states[name] for state in filled], reduction)
            for name, reduction in reductions.items()
        },
    )


def _reduce_one(values: list[_State], reduction: _Reduction) -> _State:
    if isinstance(values[0], list):
        joined: _State = [element for value in values for element in value]
        if not joined:
            return joined
    else:
        joined = torch.stack(cast("list[torch.Tensor]", values))
    return joined if reduction is None else reduction(joined)
