"""The gradients of a step: summed over ranks, divided once by the weight of all microbatches."""

import contextlib
import itertools
from collections.abc import Generator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from d9d.core.device import HostCopy, accumulator_dtype, join_stream, side_stream
from d9d.core.dist_context import DistributedContext
from d9d.core.offload import MovableMemory, Offloadable, OffloadContext, OnloadContext
from d9d.core.placement import compute_leaf, is_sharded, trainable
from d9d.core.side_loss import LOSS_SCALE
from d9d.internals.fsdp_accumulation import FsdpAccumulation
from d9d.internals.grad_norm import LocalGradients
from d9d.internals.grad_sync import GradientSynchronizer
from d9d.internals.tied_parameters import TiedGradients
from d9d.loop.component.tracked_modules import TrackedModules
from d9d.loop.config import GradientManagerConfig


class GradientManager(Offloadable):
    """Accumulates, sums and scales the gradients of a pack.

    The loss of a step is ``sum(loss * weight) / sum(weight)`` over all microbatches of all ranks. Backward passes start
    from ``loss * weight``, gradients are summed, and the division happens once, at the end.

    [Note: a step without weight]
    If all weights of a step are 0 there is nothing to learn from it, and dividing would produce NaN. All ranks see the
    same total, so all skip the update (or raise, by `on_zero_weight`), and weights and optimizer state stay as they
    are. A single microbatch of weight 0 contributes exactly 0, whatever its loss is.
    """

    def __init__(
        self, dist_context: DistributedContext, tracked_modules: TrackedModules, config: GradientManagerConfig
    ) -> None:
        """Describe the gradients; `install` allocates them."""
        self._data_group = dist_context.data_group
        self._replica_group = dist_context.replica_group
        self._device = dist_context.current_device
        self._config = config
        self._is_pipelined = dist_context.mesh_params.has_pipeline_parallel
        self._parameters = [trainable(module.parameters()) for module in tracked_modules.modules]
        # Programs finish the backward passes of later stages first.
        ties = tracked_modules.ties
        self._synchronizer = GradientSynchronizer(
            self._parameters[::-1], config.bucket_size_mb, uncounted=ties.uncounted()
        )
        self._tied_gradients = TiedGradients(ties, self._synchronizer)
        self._fsdp = [
            FsdpAccumulation(
                [module],
                keep_sharded=config.fsdp_keep_sharded,
                group=dist_context.replica_group,
                device=self._device,
            )
            for module in tracked_modules.modules
        ]
        self._num_microbatches = 0
        self._num_losses = 0
        self._has_begun = False
        self._is_weighted = False
        self._loss_weights: Sequence[torch.Tensor | None] = ()
        # Loss sum and weight sum of this rank, then of the job, in one tensor for one collective.
        self._totals = torch.zeros(2, dtype=accumulator_dtype(self._device), device=self._device)
        self._loss_sum, self._weight_sum = self._totals.unbind()
        self._own_loss_sum: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self._stream: torch.Stream | None = None
        self._host_totals: HostCopy | None = None
        self._memory = MovableMemory()

    @contextlib.contextmanager
    def install(self) -> Generator[None]:
        """Hold the gradients while the block runs, and leave the parameters without any afterwards.

        Raises:
            NotImplementedError: If the config asks for gradients of another dtype than that of sharded parameters, or a
                parameter is distributed over some ranks without being so over those with other data.
            ValueError: If copies of a tied weight have come to differ since they were built, as one was frozen.
        """
        if self._config.torch_grad_dtype is not None:
            for parameter in (parameter for group in self._parameters for parameter in group):
                _set_grad_dtype(parameter, self._config.torch_grad_dtype)
        self._refuse_unsummed()
        self._tied_gradients.refuse_differences()
        self._synchronizer.bind()
        try:
            yield
        finally:
            self._synchronizer.unbind()
            for fsdp in self._fsdp:
                fsdp.abandon_pack()
            self._start_totals_anew()

    def _refuse_unsummed(self) -> None:
        """Refuse parameters whose gradients nobody would sum over the ranks with other data."""
        group = self._replica_group
        data_ranks = set[int]() if group is None else set(dist.get_process_group_ranks(group))
        shapes = {
            str(parameter.device_mesh.mesh_dim_names): tuple(parameter.shape)
            for parameter in itertools.chain.from_iterable(self._parameters)
            if isinstance(parameter, DTensor) and not data_ranks <= set(parameter.device_mesh.mesh.flatten().tolist())
        }
        if shapes:
            raise NotImplementedError(
                f"parameters are distributed over a mesh without the data-parallel ranks, so that nobody would sum their "
                f"gradients over these (dimensions of the mesh and shape of one of them: {shapes}). Distribute them over "
                f"these ranks too: by parallelize_fsdp or parallelize_hsdp with shards, after tensor parallelism."
            )

    def set_required_accumulations(
        self, require_accumulations: int, loss_weights: Sequence[torch.Tensor | None] = ()
    ) -> None:
        """Start a pack, before its first forward pass.

        Args:
            require_accumulations: Number of microbatches of the pack on this rank.
            loss_weights: What each of them counts for, where that is known; see [Note: the scale of side losses].
        """
        self._num_microbatches = require_accumulations
        self._has_begun = True
        self._loss_weights = loss_weights
        self._synchronizer.set_required_accumulations(0)
        for fsdp in self._fsdp:
            fsdp.start_pack(require_accumulations)

    def before_microbatch(self, microbatch: int) -> None:
        """Let the layers of all stages know what their losses are multiplied by."""
        LOSS_SCALE.set(self._loss_weights[microbatch] if self._loss_weights else None)

    def before_backward(self, stage: int, *, is_last: bool, is_split: bool) -> None:
        """Prepare for a backward pass: the last one of a stage sums gradients, all others only accumulate them."""
        # See [Note: split backward passes under FSDP].
        self._fsdp[stage].before_backward(is_last=is_last and not is_split)
        if is_last:
            self._synchronizer.sum_after_next_backward(len(self._fsdp) - 1 - stage)

    def before_split_backward(self, stage: int) -> None:
        """Prepare for gradients of activations, ahead of those of the weights."""
        self._fsdp[stage].before_backward(is_last=False)

    def after_backward(self, stage: int, *, is_last: bool, is_split: bool) -> None:
        """Sum the gradients of a stage that its last backward pass has only accumulated."""
        if is_split:
            self._fsdp[stage].after_split_backward(is_last=is_last)

    def add_loss_with_weight(self, loss: torch.Tensor, loss_weight: torch.Tensor | None) -> torch.Tensor:
        """Count the loss of a microbatch, and return what to run its backward pass from.

        Args:
            loss: Loss of the microbatch, one value.
            loss_weight: What it counts for in the step, one value that is not negative; None counts as 1.

        Returns:
            ``loss * weight``, and exactly 0 where the weight is 0.

        Raises:
            ValueError: If the loss has several elements.
        """
        if loss.numel() != 1:
            raise ValueError(
                f"compute_loss() returned a loss of shape {tuple(loss.shape)}: it must hold one value. Reduce it, for "
                f"example with .mean()."
            )
        self._num_losses += 1
        weighted = loss
        if loss_weight is not None:
            self._is_weighted = True
            dtype = torch.promote_types(loss.dtype, torch.float32)
            weight = loss_weight.detach().to(loss.device, dtype)
            weighted = torch.where(weight == 0, 0.0, loss * weight)
            self._weight_sum += weight.reshape(())
        else:
            self._weight_sum += 1.0
        self._loss_sum += weighted.detach().reshape(())
        if self._num_losses == self._num_microbatches and not self._is_pipelined:
            self._reduce_totals()
        return weighted

    def _reduce_totals(self) -> None:
        """Start to sum loss and weight over ranks, ahead of the last backward pass and beside it."""
        if self._config.on_nonfinite != "ignore":
            self._own_loss_sum = self._loss_sum.clone()
        if self._data_group is not None:
            with side_stream(self._device) as stream:
                self._work = dist.all_reduce(self._totals, group=self._data_group, async_op=True)
                self._stream = stream
                if stream is not None and self._work is not None:
                    self._work.wait()
                    self._host_totals = HostCopy(self._totals) if self._may_lack_weight else None
        elif self._may_lack_weight:
            self._host_totals = HostCopy(self._totals)

    def sync_and_scale(self) -> None:
        """Finish the sums over ranks and divide the gradients by the weight of the step. All ranks must call it."""
        if self._is_pipelined or self._num_losses < max(1, self._num_microbatches):
            # Most ranks of a pipeline see no loss, so none starts ahead of the others.
            self._reduce_totals()
        if self._work is not None:
            self._work.wait()
        join_stream(self._stream)
        self._synchronizer.wait()
        self._tied_gradients.sum()
        self._synchronizer.scale_grads(_safe_inverse(self._weight_sum))

    def should_update(self) -> bool:
        """Tell whether the step has any weight, after `sync_and_scale`; the same on all ranks.

        Waits, if at all, for a copy that was queued before the last backward pass.

        Raises:
            RuntimeError: If it has none and the config says so.
        """
        if not self._may_lack_weight:
            return True
        totals = self._totals if self._host_totals is None else self._host_totals.read()
        if totals[1] != 0:
            return True
        if self._config.on_zero_weight == "raise":
            raise RuntimeError(
                "The loss weights of all microbatches of this step are 0 on all ranks. Check the labels of the data, or "
                "set gradient_manager.on_zero_weight: skip to leave such steps out."
            )
        return False

    @property
    def _may_lack_weight(self) -> bool:
        """Whether the weight of the step may be 0, as far as this rank knows; without a last stage it knows nothing."""
        return self._is_weighted or self._num_losses == 0

    def compute_global_loss(self) -> torch.Tensor:
        """Return the weighted mean loss of the step over all ranks, 0 for a step without weight.

        A new tensor on the device, which the host has not waited for. Valid between `sync_and_scale` and `zero_grad`.
        """
        return self._loss_sum * _safe_inverse(self._weight_sum)

    @property
    def own_loss_sum(self) -> torch.Tensor | None:
        """Weighted sum of the losses of this rank, on the device; None where `on_nonfinite` is "ignore"."""
        return self._own_loss_sum

    def local_gradients(self) -> list[LocalGradients]:
        """Return the gradients of this rank for `clip_local_gradients_`."""
        return self._synchronizer.local_gradients()

    @property
    def has_in_flight_gradients(self) -> bool:
        """Whether a step has begun to accumulate gradients and not been cleared."""
        return self._has_begun

    def offload(self, ctx: OffloadContext) -> None:
        """Move the memory of gradients to the host.

        Raises:
            RuntimeError: In the middle of a step, when gradients may be on their way to other ranks.
        """
        if self.has_in_flight_gradients:
            raise RuntimeError("gradients can not be offloaded in the middle of a step. Do it between two steps.")
        holders = [holder for group in self._parameters for one in group for holder in (one, compute_leaf(one))]
        gradients = [holder.grad for holder in holders if holder.grad is not None]
        self._memory.offload([*self._synchronizer.memory(), *gradients], ctx)

    def onload(self, ctx: OnloadContext) -> None:
        """Bring the memory of gradients back."""
        self._memory.onload(ctx)

    def is_offloaded(self) -> bool:
        """Tell whether the memory of gradients is on the host."""
        return self._memory.is_offloaded

    def zero_grad(self) -> None:
        """Clear gradients, losses and weights for the next step, once the parameters are updated."""
        for fsdp in self._fsdp:
            fsdp.after_update()
        self._synchronizer.zero_grad()
        self._start_totals_anew()

    def _start_totals_anew(self) -> None:
        # A new tensor: logging may still hold a copy that reads from the old one on another stream.
        self._totals = torch.zeros_like(self._totals)
        self._loss_sum, self._weight_sum = self._totals.unbind()
        self._num_losses = 0
        self._has_begun = False
        self._is_weighted = False
        self._work, self._stream, self._host_totals = None, None, None


def _set_grad_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    if is_sharded(parameter) and parameter.dtype != dtype:
        raise NotImplementedError(
            f"gradient_manager.grad_dtype ({dtype}) differs from the dtype of sharded parameters ({parameter.dtype}), "
            f"which is that of the gradients FSDP makes. Leave grad_dtype out, or keep the parameters in {dtype} and "
            f"pass mp_policy=MixedPrecisionPolicy(param_dtype={parameter.dtype}, reduce_dtype={dtype}) to "
            f"parallelize_hsdp."
        )
    for tensor in (parameter, compute_leaf(parameter)):
        tensor.grad_dtype = dtype


def _safe_inverse(total: torch.Tensor) -> torch.Tensor:
    """Return 1 / total, and 0 where the total is 0."""
    return torch.where(total == 0, 0.0, 1.0 / total)
