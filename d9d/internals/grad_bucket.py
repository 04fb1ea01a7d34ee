"""One flat piece of memory that holds the gradients of several parameters, so that one collective sums them all."""

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from d9d.core.placement import compute_leaf, groups_where, like_parameter, local_tensor


class GradientBucket:
    """Gradients of parameters that are summed over the same groups, as views of one buffer.

    [Note: unused parameters]
    Behind the gradients the buffer has one element per parameter, which is 1 where this rank produced a gradient and 0
    where it did not, and which the same collective sums. A rank that lacks a gradient looks up whether any other rank
    had one. If none had, the gradient of the parameter is None, as on one process, so that the optimizer leaves it
    alone. Ranks with all gradients need not look, so the host waits for nothing in the common case.
    """

    def __init__(self, parameters: list[nn.Parameter], groups: tuple[dist.ProcessGroup, ...]) -> None:
        """Allocate the buffer and attach the gradients.

        Args:
            parameters: Parameters of one device and gradient dtype.
            groups: Groups to sum over, innermost first. None if the bucket only holds the gradients.
        """
        self._parameters = parameters
        self._leaves = [compute_leaf(parameter) for parameter in parameters]
        self._groups = groups
        self._shard_groups = groups_where(parameters[0], replicated=False)
        local = [local_tensor(leaf) for leaf in self._leaves]
        numels = [tensor.numel() for tensor in local]
        self._buffer = torch.zeros(
            sum(numels) + len(numels), dtype=gradient_dtype(self._leaves[0]), device=local[0].device
        )
        *pieces, self._was_used = self._buffer.split([*numels, len(numels)])
        self._payload = self._buffer[: sum(numels)]
        self._views = [piece.view(tensor.shape) for piece, tensor in zip(pieces, local, strict=True)]
        self._gradients = [like_parameter(view, leaf) for view, leaf in zip(self._views, self._leaves, strict=True)]
        self._parameter_gradients = [
            gradient if leaf is parameter else like_parameter(view, parameter)
            for gradient, view, leaf, parameter in zip(
                self._gradients, self._views, self._leaves, parameters, strict=True
            )
        ]
        self._counts = [0] * len(parameters)
        self._used = [False] * len(parameters)
        self._num_pending = 0
        self._required = 0
        self._works: list[dist.Work] | None = None
        self._is_finished = False
        self._attach()

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The tensors that autograd accumulates into."""
        return self._leaves

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the bucket."""
        return self._parameters

    @property
    def shard_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups over which each parameter of the bucket is cut in parts."""
        return self._shard_groups

    @property
    def payload(self) -> torch.Tensor:
        """All gradients of the bucket as one vector on this rank."""
        return self._payload

    @property
    def is_complete(self) -> bool:
        """Whether every parameter has got all the gradients of the pack."""
        return self._num_pending == 0

    @property
    def was_launched(self) -> bool:
        """Whether the sum of the pack has been started."""
        return self._works is not None

    def _attach(self) -> None:
        for index in range(len(self._parameters)):
            self.attach_one(index)

    def attach_one(self, index: int) -> None:
        """Let a parameter have the gradient that the bucket holds for it.

        Args:
            index: Position of the parameter in the bucket.
        """
        leaf, parameter = self._leaves[index], self._parameters[index]
        leaf.grad = self._gradients[index]
        if parameter is not leaf:
            parameter.grad = self._parameter_gradients[index]

    def detach(self) -> None:
        """Take the views off the parameters, which then have no gradient."""
        for leaf, parameter in zip(self._leaves, self._parameters, strict=True):
            leaf.grad = None
            parameter.grad = None

    def start_pack(self, required: int) -> None:
        """Count gradients anew; what has been accumulated stays.

        Args:
            required: Number of gradients per parameter until the bucket is complete, 0 while nothing is to be summed.
        """
        self._required = required
        self._counts[:] = [0] * len(self._parameters)
        self._num_pending = len(self._parameters)
        self._works = None
        self._is_finished = False

    def build_hook(self, index: int, on_complete: Callable[[], None]) -> Callable[[torch.Tensor], None]:
        """Return what autograd calls each time it has accumulated a gradient of one parameter.

        Args:
            index: Position of the parameter in the bucket.
            on_complete: Method to call when the last gradient of the pack is there. Like the bucket it is held weakly.
        """
        gradient, used = self._gradients[index], self._used
        # Python's garbage collector does not look into these hooks (torch 2.13): one that held its parameter would keep
        # the whole model alive, where a failed job leaves without `GradientSynchronizer.unbind`.
        bucket_reference, on_complete_reference = weakref.ref(self), weakref.WeakMethod(on_complete)

        def on_gradient(leaf: torch.Tensor) -> None:
            # This runs once per parameter and backward pass: keep it short.
            bucket = bucket_reference()
            if bucket is None:
                return
            if leaf.grad is not gradient:
                bucket._adopt(index)
            used[index] = True
            if bucket._required and bucket._count(index) and (complete := on_complete_reference()) is not None:
                complete()

        return on_gradient

    def _count(self, index: int) -> bool:
        """Count a gradient, and return whether it was the last one of the pack.

        Raises:
            RuntimeError: If the sum of the pack is on its way already.
        """
        self._counts[index] += 1
        if self.was_launched:
            raise RuntimeError(
                f"a parameter of shape {tuple(self._parameters[index].shape)} got gradient {self._counts[index]} of "
                f"{self._required} after its bucket was sent. This happens when a layer is used several times under "
                f"reentrant activation checkpointing: pass use_reentrant=False to torch.utils.checkpoint."
            )
        if self._counts[index] == self._required:
            self._num_pending -= 1
        return self._num_pending == 0

    def _adopt(self, index: int) -> None:
        """Move a gradient into the bucket that autograd or the user put elsewhere (``create_graph``, ``grad=None``)."""
        leaf = self._leaves[index]
        view = self._views[index]
        if leaf.grad is None:
            view.zero_()
        else:
            with torch.no_grad():
                view.copy_(local_tensor(leaf.grad))
        self.attach_one(index)

    def launch(self) -> None:
        """Start to sum the bucket. All ranks of the groups must launch their buckets in the same order."""
        self._was_used.fill_(1)
        unused = self._unused()
        for index in unused:
            if self._leaves[index].grad is not self._gradients[index]:
                self._adopt(index)
        if unused:
            self._was_used[unused] = 0
        # Further groups would have to wait for the first; they start when it has been waited for.
        self._works = [_start_sum(self._buffer, group) for group in self._groups[:1]]

    def finish(self) -> None:
        """Wait until the sum is there; again, it does nothing. On an accelerator the stream waits, not the host."""
        assert self._works is not None  # the synchronizer launches all buckets before it waits
        if self._is_finished:
            return
        self._is_finished = True
        for work in self._works:
            work.wait()
        for group in self._groups[1:]:
            _start_sum(self._buffer, group).wait()
        unused = self._unused()
        if unused:
            # See [Note: unused parameters]. This reads from the device, in the uncommon case only.
            for index, was_used in zip(unused, self._was_used[unused].tolist(), strict=True):
                if not was_used:
                    self._leaves[index].grad = None
                    self._parameters[index].grad = None

    def _unused(self) -> list[int]:
        return [index for index, used in enumerate(self._used) if not used]

    def zero(self) -> None:
        """Clear the gradients, and start the next pack like the last one."""
        self._buffer.zero_()
        for index, (leaf, parameter) in enumerate(zip(self._leaves, self._parameters, strict=True)):
            # Detached as unused, or by an optimizer that set gradients to None.
            if leaf.grad is not self._gradients[index] or parameter.grad is not self._parameter_gradients[index]:
                self.attach_one(index)
        self._used[:] = [False] * len(self._parameters)
        self.start_pack(self._required)


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient, that of the parameter unless it says otherwise."""
    return parameter.grad_dtype or parameter.dtype


def _start_sum(buffer: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    work = dist.all_reduce(buffer, op=dist.ReduceOp.SUM, group=group, async_op=True)
    assert work is not None  # this rank is a member
    return work
