"""Sum gradients over the mesh dimensions where their parameters are replicated, while the backward pass still runs."""
# torch exports its foreach operations under private names only (torch 2.13)
# pyright: reportPrivateUsage=false
# pyright: reportPrivateImportUsage=false

import dataclasses
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from d9d.core.placement import (
    compute_leaf,
    groups_where,
    has_compute_leaf,
    like_parameter,
    local_tensor,
    refuse_direct_gradient,
    trainable,
)
from d9d.internals.grad_bucket import GradientBucket, gradient_dtype
from d9d.internals.grad_norm import LocalGradients, ShardedAlike, group_parameters_for_norm

_TENSOR_DIM = "tp"
"""Name of the mesh dimension of tensor parallelism, in all domains."""
_EXPERT_DIMS = frozenset({"ep_replicate", "ep_shard"})
"""Names of the dimensions into which the expert domain cuts the ranks with different data."""


def groups_to_sum(parameter: torch.Tensor, data_groups: tuple[dist.ProcessGroup, ...]) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which the gradient of a parameter is summed, innermost first.

    These are the groups of ranks with different data, less those that the parameter is sharded over, where FSDP sums.
    Tensor-parallel peers have the same data and compute the same gradient of what they do not split, so nothing is
    summed over them.

    Args:
        parameter: Plain tensor or DTensor.
        data_groups: Groups of the data-parallel mesh dimensions. Empty: those along which the parameter says that it
            is replicated, tensor parallelism left out. So it is, too, for parameters over the expert domain, which
            cuts the same ranks in another way.
    """
    if not isinstance(parameter, DTensor):
        return data_groups
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    if data_groups and _EXPERT_DIMS.isdisjoint(names):
        sharded = groups_where(parameter, replicated=False)
        return tuple(group for group in data_groups if group not in sharded)
    tensor_parallel = [mesh.get_group(_TENSOR_DIM)] if _TENSOR_DIM in names else []
    return tuple(group for group in groups_where(parameter, replicated=True) if group not in tensor_parallel)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _NormPart:
    """Where the gradients of parameters are that are sharded over the same groups."""

    group: ShardedAlike
    buckets: list[GradientBucket]
    unbucketed: list[nn.Parameter]
    is_counted: bool

    def local_gradients(self) -> LocalGradients:
        tensors = [bucket.payload for bucket in self.buckets] + _local_gradients_of(self.unbucketed)
        return self.group.with_tensors(tensors, is_counted=self.is_counted)


class GradientSynchronizer:
    """Holds the gradients of a model in buckets and sums each bucket as soon as its last gradient is there.

    Parameters that are replicated over some mesh dimension go into flat buckets, filled in reverse order of the
    parameters, which is about the order in which the backward pass reaches them. So do those that are replicated over
    one rank only, since their modules compute with plain leaves. All others (plain tensors, and shards whose sums FSDP
    does) need no sum here and keep the gradients that autograd gives them.

    [Note: order of collectives]
    All ranks must start the sums in the same order, but parameters may be ready in different orders, or not at all on
    some ranks. So a bucket starts only after its predecessor; what is left starts in `wait`.
    """

    def __init__(
        self,
        param_groups: list[list[nn.Parameter]],
        bucket_size_mb: int,
        *,
        plain_groups: tuple[dist.ProcessGroup, ...] = (),
        uncounted: Iterable[nn.Parameter] = (),
    ) -> None:
        """Describe the parameters; `bind` allocates.

        Args:
            param_groups: Parameters, such as those of one pipeline stage; no bucket spans two lists. The sums of a list
                start after those of the lists before it, so the ones that are ready first come first.
            bucket_size_mb: Size at which a bucket is full, in MiB. Larger parameters get a bucket of their own.
            plain_groups: Groups of the ranks with different data, innermost first, where they are known; see
                `groups_to_sum`. By default plain tensors are taken to belong to this rank alone.
            uncounted: Those whose gradients are no part of the norm, as they are copies of what counts elsewhere.
        """
        if bucket_size_mb <= 0:
            raise ValueError(f"bucket_size_mb ({bucket_size_mb}) must be positive. The usual value is 32.")
        self._param_groups = [trainable(group) for group in param_groups]
        self._bucket_size_bytes = bucket_size_mb * 2**20
        self._plain_groups = plain_groups
        self._uncounted = frozenset(uncounted)
        self._buckets: list[GradientBucket] = []
        self._buckets_of_group: list[list[GradientBucket]] = []
        self._unbucketed: list[nn.Parameter] = []
        self._norm_parts: list[_NormPart] = []
        self._handles: list[RemovableHandle] = []
        self._next_bucket = 0

    def bind(self) -> None:
        """Allocate the buckets and hook into autograd. The parameters must be on their device by now."""
        if self._handles or self._buckets:
            raise RuntimeError("the gradient synchronizer is bound already; unbind it first")
        for group in self._param_groups:
            buckets: list[GradientBucket] = []
            for parameters, groups in self._fill_buckets(group):
                if groups or has_compute_leaf(parameters[0]):
                    buckets.append(GradientBucket(parameters, groups))
                else:
                    self._unbucketed.extend(parameters)
            self._buckets_of_group.append(buckets)
            self._buckets.extend(buckets)
        self._norm_parts = self._group_for_norm()
        for parameter in (parameter for group in self._param_groups for parameter in group):
            if has_compute_leaf(parameter):
                refuse_direct_gradient(parameter)
        for bucket in self._buckets:
            for index, leaf in enumerate(bucket.leaves):
                hook = bucket.build_hook(index, self._launch_complete)
                self._handles.append(leaf.register_post_accumulate_grad_hook(hook))

    def unbind(self) -> None:
        """Remove the hooks and free the buckets; parameters are left without gradients."""
        for handle in self._handles:
            handle.remove()
        for bucket in self._buckets:
            bucket.detach()
        for parameter in self._unbucketed:
            parameter.grad = None
        self._handles, self._buckets, self._buckets_of_group = [], [], []
        self._unbucketed, self._norm_parts = [], []

    def set_required_accumulations(self, require_accumulations: int) -> None:
        """Start a pack: sum a bucket once each of its parameters has got this many gradients.

        Args:
            require_accumulations: Number of backward passes until the sum; 0 accumulates only.
        """
        self._next_bucket = 0
        for bucket in self._buckets:
            bucket.start_pack(require_accumulations)

    def sum_after_next_backward(self, param_group: int) -> None:
        """Sum the buckets of one list of parameters in the next backward pass, in a pack that only accumulates so far.

        Args:
            param_group: Index of the list.
        """
        for bucket in self._buckets_of_group[param_group]:
            bucket.start_pack(1)

    def wait(self) -> None:
        """Finish the sums of the pack. All ranks must call it; on an accelerator it does not block the host."""
        for bucket in self._buckets[self._next_bucket :]:
            bucket.launch()
        self._next_bucket = len(self._buckets)
        for bucket in self._buckets:
            bucket.finish()
        self._match_placements()

    @torch.no_grad()
    def _match_placements(self) -> None:
        """Lay gradients out like their parameters.

        Autograd leaves those of split layers in the placement that they were computed in, such as whole gradients of parts, or
        partial sums of a weight that all peers have. The norm and optimizers on local shards read parts as the parameter has
        them.
        """
        for parameter in self._unbucketed:
            gradient = parameter.grad
            if (
                isinstance(gradient, DTensor)
                and isinstance(parameter, DTensor)
                and gradient.placements != parameter.placements
            ):
                parameter.grad = gradient.redistribute(placements=parameter.placements)

    @torch.no_grad()
    def scale_grads(self, factor: torch.Tensor) -> None:
        """Multiply all gradients by a scalar tensor on their device."""
        tensors = self.memory()
        if tensors:
            torch._foreach_mul_(tensors, factor)

    def memory(self) -> list[torch.Tensor]:
        """Return the local tensors that hold all gradients, which share memory with those of the parameters."""
        return [bucket.payload for bucket in self._buckets] + _local_gradients_of(self._unbucketed)

    def zero_grad(self) -> None:
        """Clear all gradients: the buckets are zeroed, all others become None. The next pack starts like the last."""
        self._next_bucket = 0
        for bucket in self._buckets:
            bucket.zero()
        for parameter in self._unbucketed:
            parameter.grad = None

    def local_gradients(self) -> list[LocalGradients]:
        """Return this rank's gradients, grouped by how their parameters are sharded; buckets as one vector each."""
        return [part.local_gradients() for part in self._norm_parts]

    def attach_gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the local gradient of a parameter, after `wait`. If it has none, it gets zeros."""
        if parameter.grad is None:
            self._attach_zeros(parameter)
        assert parameter.grad is not None  # just attached
        return local_tensor(parameter.grad)

    def _attach_zeros(self, parameter: nn.Parameter) -> None:
        for bucket in self._buckets:
            for index, member in enumerate(bucket.parameters):
                if member is parameter:
                    bucket.attach_one(index)  # nobody has used it, so that the sum in the bucket is 0
                    return
        zeros = torch.zeros_like(local_tensor(parameter), dtype=gradient_dtype(parameter))
        parameter.grad = like_parameter(zeros, parameter)

    def _group_for_norm(self) -> list[_NormPart]:
        """Sort buckets and unbucketed parameters by what they are sharded over, and by whether they count."""
        bucketed = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        unbucketed = set(self._unbucketed)
        parts: list[_NormPart] = []
        for is_counted in (True, False):
            parameters = [
                parameter
                for parameter in (*bucketed, *self._unbucketed)
                if (parameter not in self._uncounted) == is_counted
            ]
            for group in group_parameters_for_norm(parameters).groups:
                members = set(group.parameters)
                parts.append(
                    _NormPart(
                        group=group,
                        buckets=[bucket for bucket in self._buckets if bucket.parameters[0] in members],
                        unbucketed=[parameter for parameter in group.parameters if parameter in unbucketed],
                        is_counted=is_counted,
                    )
                )
        return parts

    def _launch_complete(self) -> None:
        """Start the buckets that are complete, up to the first that is not."""
        while self._next_bucket < len(self._buckets) and self._buckets[self._next_bucket].is_complete:
            self._buckets[self._next_bucket].launch()
            self._next_bucket += 1

    def _fill_buckets(
        self, parameters: Sequence[nn.Parameter]
    ) -> list[tuple[list[nn.Parameter], tuple[dist.ProcessGroup, ...]]]:
        """Cut a list into buckets of one layout, device and dtype, in reverse order."""
        layouts: dict[object, tuple[list[nn.Parameter], tuple[dist.ProcessGroup, ...]]] = {}
        for parameter in reversed(parameters):
            groups = groups_to_sum(parameter, self._plain_groups)
            leaf = compute_leaf(parameter)
            layout = (
                groups,
                groups_where(parameter, replicated=False),
                leaf.device,
                gradient_dtype(leaf),
                bool(groups) or has_compute_leaf(parameter),
                parameter in self._uncounted,
            )
            layouts.setdefault(layout, ([], groups))[0].append(parameter)
        buckets: list[tuple[list[nn.Parameter], tuple[dist.ProcessGroup, ...]]] = []
        for members, groups in layouts.values():
            bucket: list[nn.Parameter] = []
            num_bytes = 0
            for parameter in members:
                leaf = compute_leaf(parameter)
                size = local_tensor(leaf).numel() * gradient_dtype(leaf).itemsize
                if bucket and num_bytes + size > self._bucket_size_bytes:
                    buckets.append((bucket, groups))
                    bucket, num_bytes = [], 0
                bucket.append(parameter)
                num_bytes += size
            buckets.append((bucket, groups))
        return buckets


def _local_gradients_of(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
