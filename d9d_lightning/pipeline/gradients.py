"""Sum the gradients of a pack over replicas while the stages still run, and those outside the stages over the pipeline."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from d9d.core.placement import trainable
from d9d.core.side_loss import LOSS_SCALE
from d9d.internals.fsdp_accumulation import FsdpAccumulation
from d9d.internals.grad_sync import GradientSynchronizer

__all__ = ["PipelineGradients"]


class PipelineGradients:
    """The gradients of the stages of this rank, and of what is outside of them: a `BackwardObserver`.

    [Note: parameters outside the stages]
    A parameter that ``training_step`` uses before or behind the pipelined call, such as a projection in front, a head or a
    temperature, is on all ranks of the pipeline, but its gradient comes up on the first or the last stage alone. Its sum
    goes over the pipeline as well as over the replicas, once all backward passes of the pack have run. So all copies get
    the same gradient, and stay equal.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        outside: Sequence[nn.Parameter],
        *,
        data_groups: tuple[dist.ProcessGroup, ...],
        pipeline_group: dist.ProcessGroup,
        bucket_size_mb: int,
    ) -> None:
        """Allocate buckets and hook into autograd. Call `release` when training ends.

        Args:
            stages: Stages of this rank in stage order, distributed.
            outside: All other parameters of the LightningModule, plain tensors with equal values on all ranks.
            data_groups: Groups of the data-parallel mesh dimensions, innermost first.
            pipeline_group: Ranks with the other stages, for collectives.
            bucket_size_mb: Size of a bucket in MiB.
        """
        self._stages = list(stages)
        self._outside_parameters = list(outside)
        self._data_groups = data_groups
        self._pipeline_group = pipeline_group
        self._bucket_size_mb = bucket_size_mb
        self._fsdp = [FsdpAccumulation([stage]) for stage in stages]
        self._frozen: list[nn.Parameter] = []
        self._loss_scales: Sequence[float] = ()
        self._build()

    def _build(self) -> None:
        parameters = [trainable(stage.parameters()) for stage in self._stages]
        every = [parameter for group in parameters for parameter in group] + self._outside_parameters
        self._frozen = [
            parameter
            for parameter in (*self._outside_parameters, *(p for stage in self._stages for p in stage.parameters()))
            if not parameter.requires_grad
        ]
        # Programs finish the backward passes of later stages first.
        self._inside = GradientSynchronizer(parameters[::-1], self._bucket_size_mb, plain_groups=self._data_groups)
        self._outside = GradientSynchronizer(
            [self._outside_parameters],
            self._bucket_size_mb,
            plain_groups=(*self._data_groups, self._pipeline_group),
        )
        for synchronizer in (self._inside, self._outside):
            synchronizer.bind()
        self.dtype = torch.float64 if any(parameter.dtype == torch.float64 for parameter in every) else torch.float32
        """Type of a factor that gradients are multiplied by."""

    def start_pack(self, loss_scales: Sequence[float]) -> None:
        """Prepare for a pack without any gradients yet, before its first forward pass. All ranks must call it.

        Args:
            loss_scales: What the loss of each microbatch is multiplied by; see [Note: the scale of side losses].
        """
        self._loss_scales = loss_scales
        if any(parameter.requires_grad for parameter in self._frozen):
            # What was frozen when training began has no place in a bucket yet.
            self.release()
            self._build()
        for synchronizer in (self._inside, self._outside):
            synchronizer.zero_grad()
            synchronizer.set_required_accumulations(0)
        for fsdp in self._fsdp:
            fsdp.start_pack(max(2, len(loss_scales)))

    def before_microbatch(self, microbatch: int) -> None:
        """Let the layers of all stages know what their losses are multiplied by."""
        LOSS_SCALE.set(self._loss_scales[microbatch])

    def before_backward(self, stage: int, *, is_last: bool, is_split: bool) -> None:
        """Prepare for a backward pass: the last one of a stage sums gradients, all others only accumulate them."""
        self._fsdp[stage].before_backward(is_last=is_last and not is_split)
        if is_last:
            self._inside.sum_after_next_backward(len(self._fsdp) - 1 - stage)

    def before_split_backward(self, stage: int) -> None:
        """Prepare for gradients of activations, ahead of those of the weights."""
        self._fsdp[stage].before_backward(is_last=False)

    def after_backward(self, stage: int, *, is_last: bool, is_split: bool) -> None:
        """Sum the gradients of a stage that its last backward pass has only accumulated."""
        if is_split:
            self._fsdp[stage].after_split_backward(is_last=is_last)

    def finish(self, scale: torch.Tensor) -> None:
        """Finish the sums and multiply all gradients. All ranks must call it.

        Args:
            scale: A scalar on the device of the parameters.
        """
        for synchronizer in (self._inside, self._outside):
            synchronizer.wait()
            synchronizer.scale_grads(scale)

    def release(self) -> None:
        """Free buckets and hooks; the parameters are left without gradients."""
        for fsdp in self._fsdp:
            fsdp.abandon_pack()
        self._inside.unbind()
        self._outside.unbind()
