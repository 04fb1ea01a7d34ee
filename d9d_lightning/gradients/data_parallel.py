"""The Lightning side of gradient sync: which backward passes sum, what hooks see, and what zeroing means."""
# torch._foreach_* have no public names
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import contextlib
import math
from collections.abc import Generator, Sequence

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from d9d.core.fsdp_internals import fsdp_parameters, fsdp_units, gathered_parameter
from d9d.core.placement import compute_leaf, like_parameter, local_tensor, trainable
from d9d.internals.fsdp_accumulation import FsdpAccumulation
from d9d.internals.grad_sync import GradientSynchronizer, groups_to_sum


class OptimizerGradients:
    """Gradients of the parameters of one optimizer.

    [Note: averaged gradients]
    Lightning's losses are means over a rank's batch, so after the sums each gradient is divided by the number of
    data-parallel ranks. If gradients are not cleared before the next backward pass (manual optimization with two
    ``manual_backward`` calls before one step), what is there already is a mean, the same on all ranks that a bucket
    sums over, and must not be summed again. A later sum over ``g`` ranks and division by ``dp`` would turn ``m`` into
    ``m * g / dp``, so it is multiplied by ``dp / g`` first. Plain parameters are summed over all data-parallel
    ranks, ``g = dp``. Under FSDP the sharded sum is added to what is there without summing that, ``g = 1``. Under HSDP
    the bucket then sums over the replicas, ``g = dp / shard``.

    [Note: cleared gradients]
    Whoever sets ``parameter.grad`` to None (``optimizer.zero_grad()``, ``module.zero_grad()``) does not reach the
    bucket behind it. It is cleared before the next backward pass, when this is noticed.
    """

    def __init__(
        self,
        parameter_lists: Sequence[list[nn.Parameter]],
        data_groups: tuple[dist.ProcessGroup, ...],
        bucket_size_mb: int,
        device: torch.device,
    ) -> None:
        """Allocate the buckets and hook into autograd.

        Args:
            parameter_lists: The optimizer's parameters, then those that are cleared with them; no bucket spans both.
            data_groups: Groups of the data-parallel mesh dimensions, innermost first.
            bucket_size_mb: Size of a bucket in MiB.
            device: Device of the parameters.
        """
        self._parameters = [parameter for parameters in parameter_lists for parameter in trainable(parameters)]
        self._cleared_by_optimizer = trainable(parameter_lists[0]) or self._parameters
        self._sync = GradientSynchronizer(
            [list(parameters) for parameters in parameter_lists], bucket_size_mb, plain_groups=data_groups
        )
        self._sync.bind()
        dp_size = math.prod(group.size() for group in data_groups)
        is_double = any(parameter.dtype == torch.float64 for parameter in self._parameters)
        self._inverse_dp_size = torch.tensor(
            1.0 / dp_size, dtype=torch.float64 if is_double else torch.float32, device=device
        )
        self._restored = _by_restoring_factor(self._parameters, data_groups)
        self._is_averaged = False

    @property
    def is_active(self) -> bool:
        """Whether any parameter takes part in the backward pass, which ``toggle_optimizer`` may prevent."""
        return any(parameter.requires_grad for parameter in self._parameters)

    @property
    def is_cleared(self) -> bool:
        """Whether none of the optimizer's parameters has a gradient."""
        return all(parameter.grad is None for parameter in self._cleared_by_optimizer)

    def before_backward(self, *, sums_early: bool) -> None:
        """Prepare for a backward pass.

        Args:
            sums_early: Whether a bucket is summed as soon as it is complete.
        """
        self._reclaim()
        if self._is_averaged:
            self._is_averaged = False
            self._restore_sums()
        self._sync.set_required_accumulations(1 if sums_early else 0)

    def finish(self) -> None:
        """Turn the gradients into means over the data-parallel ranks. All of them must call it."""
        self._sync.wait()
        self._sync.scale_grads(self._inverse_dp_size)
        self._is_averaged = True

    def release(self) -> None:
        """Free buckets and hooks; the parameters are left without gradients."""
        self._sync.unbind()

    def _reclaim(self) -> None:
        """Clear what was set to None since. See [Note: cleared gradients]."""
        if self.is_cleared:
            self._sync.zero_grad()
            self._is_averaged = False
            return
        for parameter in self._parameters:
            leaf = compute_leaf(parameter)
            if parameter.grad is None and leaf is not parameter and leaf.grad is not None:
                leaf.grad.zero_()
                parameter.grad = like_parameter(leaf.grad, parameter)

    @torch.no_grad()
    def _restore_sums(self) -> None:
        """See [Note: averaged gradients]."""
        for factor, parameters in self._restored.items():
            gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, factor)


class DataParallelGradients:
    """Makes the gradients of a module what they would be on one process, at the points where Lightning's hooks look.

    [Note: several optimizers]
    The buckets of one optimizer are summed while the backward pass runs. With several, the order in which their
    parameters become ready may differ between ranks, and so would the order of the collectives; they are summed one
    optimizer after the other when the backward pass has ended.

    [Note: abandoned accumulation]
    Under FSDP, gradients that wait for the last batch of a step are not in ``parameter.grad``. A single optimizer's
    ``zero_grad`` drops them too. With several optimizers they stay, since one cannot speak for the others.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        data_groups: tuple[dist.ProcessGroup, ...],
        bucket_size_mb: int,
        device: torch.device,
        stays_gathered: bool,
    ) -> None:
        """Take over the gradients of a module that is already distributed. Call `release` when training ends.

        Args:
            module: The LightningModule.
            optimizers: Optimizers of its parameters.
            data_groups: Groups of the data-parallel mesh dimensions, innermost first.
            bucket_size_mb: Size of a bucket in MiB.
            device: Device of the parameters.
            stays_gathered: Whether FSDP units stay gathered between the batches that accumulate.
        """
        self._module = module
        self._optimizers = optimizers
        self._data_groups = data_groups
        self._bucket_size_mb = bucket_size_mb
        self._device = device
        self._stays_gathered = stays_gathered
        self._fsdp = FsdpAccumulation([module])
        self._blocks = 0
        self._begins_window = True
        self._parts: list[OptimizerGradients] = []
        self._frozen: list[nn.Parameter] = []
        self._followed: list[Optimizer | LightningOptimizer] = []
        self._build()

    def follow_zero_grad(self, optimizer: Optimizer | LightningOptimizer) -> None:
        """Let ``zero_grad`` of the only optimizer drop what waits. See [Note: abandoned accumulation].

        Args:
            optimizer: The optimizer, or Lightning's wrapper around it, which has a ``zero_grad`` of its own.
        """
        zero_grad = optimizer.zero_grad

        def zero_and_abandon(set_to_none: bool = True) -> None:
            zero_grad(set_to_none)
            self._fsdp.abandon_pack()

        vars(optimizer)["zero_grad"] = zero_and_abandon
        self._followed.append(optimizer)

    @property
    def begins_window(self) -> bool:
        """Whether the next backward pass is the first since gradients were summed."""
        return self._begins_window

    def keep_gathered(self) -> None:
        """Let FSDP units stay gathered from the first pass of a step to its last one, however many it has."""
        self._fsdp.start_pack(2)

    @contextlib.contextmanager
    def block_sums(self) -> Generator[None]:
        """Let backward passes inside only accumulate, without any collective."""
        self._blocks += 1
        if self._stays_gathered:
            self._fsdp.start_pack(2)
        try:
            yield
        finally:
            self._blocks -= 1

    def before_backward(self) -> None:
        """Prepare for a backward pass; whether it sums depends on `block_sums`.

        Raises:
            RuntimeError: If a parameter was unfrozen while gradients are being accumulated.
        """
        if any(parameter.requires_grad for parameter in self._frozen):
            self._rebuild()
        is_last = self._begins_window = not self._blocks
        for part in self._parts:
            if part.is_active:
                part.before_backward(sums_early=is_last and len(self._parts) == 1)
        self._fsdp.before_backward(is_last=is_last)

    def after_backward(self) -> None:
        """Finish what `before_backward` has prepared. All data-parallel ranks must call it."""
        if self._blocks:
            return
        for part in self._parts:
            if part.is_active:
                part.finish()

    def release(self) -> None:
        """Free buckets and hooks; the parameters are left without gradients."""
        self._fsdp.abandon_pack()
        for optimizer in self._followed:
            vars(optimizer).pop("zero_grad", None)
        for part in self._parts:
            part.release()
        self._parts = []

    def _build(self) -> None:
        lists = _parameters_by_optimizer(self._module, self._optimizers)
        *own, rest = [trainable(parameters) for parameters in lists]
        # What no optimizer holds is cleared with the first, as nobody else would.
        first, *others = own or [[]]
        self._parts = [
            OptimizerGradients(part, self._data_groups, self._bucket_size_mb, self._device)
            for part in ([first, rest], *([other] for other in others))
            if any(part)
        ]
        self._frozen = [parameter for parameter in _parameters_of(self._module) if not parameter.requires_grad]

    def _rebuild(self) -> None:
        """Make room for parameters that were frozen when training began."""
        if self._blocks or not all(part.is_cleared for part in self._parts):
            names = [name for name, parameter in self._module.named_parameters() if parameter in set(self._frozen)]
            raise RuntimeError(
                f"parameters were unfrozen while gradients are being accumulated, among {', '.join(names[:5])}. "
                f"Unfreeze between optimizer steps, e.g. in on_train_epoch_start."
            )
        for part in self._parts:
            part.release()
        self._build()


def _parameters_by_optimizer(module: nn.Module, optimizers: Sequence[Optimizer]) -> list[list[nn.Parameter]]:
    """Return the parameters of each optimizer, and those of none; a shared one belongs to the first that has it."""
    seen: set[nn.Parameter] = set()
    lists: list[list[nn.Parameter]] = []
    held = [
        [parameter for group in optimizer.param_groups for parameter in group["params"]] for optimizer in optimizers
    ]
    for parameters in [*held, _parameters_of(module)]:
        lists.append([parameter for parameter in parameters if parameter not in seen])
        seen.update(parameters)
    return lists


def _parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters as optimizers have them, also within a step, where the module shows what FSDP has gathered."""
    shard_of = {
        gathered_parameter(parameter): parameter.sharded_param
        for unit in fsdp_units(module)
        for parameter in fsdp_parameters(unit)
    }
    return [shard_of.get(parameter, parameter) for parameter in module.parameters()]


def _by_restoring_factor(
    parameters: Sequence[nn.Parameter], data_groups: tuple[dist.ProcessGroup, ...]
) -> dict[float, list[nn.Parameter]]:
    dp_size = math.prod(group.size() for group in data_groups)
    factors: dict[float, list[nn.Parameter]] = {}
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            continue
        num_summed = math.prod(group.size() for group in groups_to_sum(parameter, data_groups))
        if num_summed != dp_size:
            factors.setdefault(dp_size / num_summed, []).append(parameter)
    return factors
