"""The norm of each gradient, and of all of them, as one process would log it."""
# torch exports its foreach operations under private names only (torch 2.13)
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import functools
import math

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from d9d.core.device import accumulator_dtype
from d9d.core.dist_ops import all_gather_object
from d9d.core.placement import groups_where, local_tensor
from d9d_lightning.gradients.precision import NormScope, clips_by_norm
from d9d_lightning.jobs.launch import active_context
from d9d_lightning.strategy import D9DStrategy

_Norms = dict[str, torch.Tensor]


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> _Norms:
    """Compute the norm of each gradient of a module and the norm over all of them, on every mesh.

    Does what ``lightning.pytorch.utilities.grad_norm`` does on one process, and returns the same on all ranks. All ranks
    must call it, in ``on_before_optimizer_step`` for instance. One collective for each set of groups that parameters are
    sharded over. Parameters without a gradient are left out. The host does not wait for the device, except with pipeline
    stages, where ranks tell each other what they have.

    Args:
        module: A LightningModule, or a part of one.
        norm_type: The p of the p-norm, a positive number or "inf".
        group_separator: Text between the two parts of a name: ``grad_2.0_norm/layer.weight``.

    Returns:
        Scalars by name; the last one, ``grad_2.0_norm_total``, is of all gradients. Empty without gradients.

    Raises:
        ValueError: If `norm_type` is not positive.
        NotImplementedError: For anything but a LightningModule with pipeline stages.
    """
    order = float(norm_type)
    if order <= 0:
        raise ValueError(f"`norm_type` must be a positive number or 'inf' (infinity norm). Got {order}")
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.grad is not None}
    norms = _norms(named, order)
    strategy = _strategy_of(module)
    if strategy is not None:
        norms = _of_all_stages(named, norms, strategy.norm_scope())
    result = {f"grad_{order}_norm{group_separator}{name}": norm for name, norm in norms.items()}
    if norms:
        dtype = functools.reduce(torch.promote_types, [norm.dtype for norm in norms.values()])
        total = torch.stack([norm.to(dtype) for norm in norms.values()]).norm(order)
        result[f"grad_{order}_norm_total"] = total
    return result


@torch.no_grad()
def _norms(named: dict[str, nn.Parameter], order: float) -> _Norms:
    """Return the norms of gradients over all of their shards, in the order of the parameters."""
    alike: dict[tuple[dist.ProcessGroup, ...], list[str]] = {}
    for name, parameter in named.items():
        alike.setdefault(groups_where(parameter, replicated=False), []).append(name)
    norms: _Norms = {}
    for groups, names in alike.items():
        local = {name: _local_norm(named[name], order) for name in names}
        norms.update(_over_shards(local, order, groups) if groups else local)
    return {name: norms[name] for name in named}


def _local_norm(parameter: nn.Parameter, order: float) -> torch.Tensor:
    assert parameter.grad is not None  # others are left out
    gradient = local_tensor(parameter.grad)
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    if not gradient.numel():
        # An empty shard; the largest of no values does not exist.
        return torch.zeros((), dtype=dtype, device=gradient.device)
    return torch.linalg.vector_norm(gradient, order, dtype=dtype)


def _over_shards(local: _Norms, order: float, groups: tuple[dist.ProcessGroup, ...]) -> _Norms:
    """Combine the norms of shards: sums of powers for a finite p, maxima for the infinity norm."""
    is_max = math.isinf(order)
    stacked = torch.stack([norm.to(accumulator_dtype(norm.device)) for norm in local.values()])
    # A maximum over ranks may lose a NaN. In this type no square of a float32 is too large or too small.
    stacked = stacked.nan_to_num(nan=math.inf, posinf=math.inf) if is_max else stacked.pow(order)
    for group in groups:
        dist.all_reduce(stacked, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
    combined = stacked if is_max else stacked.pow(1 / order)
    return {name: value.to(norm.dtype) for (name, norm), value in zip(local.items(), combined.unbind(), strict=True)}


def _strategy_of(module: nn.Module) -> D9DStrategy | None:
    trainer = module.trainer if isinstance(module, LightningModule) and module._trainer is not None else None
    strategy = None if trainer is None else trainer.strategy
    context = active_context()
    if strategy is None and context is not None and context.mesh_params.has_pipeline_parallel:
        raise NotImplementedError(
            f"grad_norm of a {type(module).__name__} with pipeline_parallel > 1: stages of other ranks are known for the "
            f"LightningModule alone. Pass that, and pick the names."
        )
    return strategy if isinstance(strategy, D9DStrategy) else None


def _of_all_stages(named: dict[str, nn.Parameter], norms: _Norms, scope: NormScope) -> _Norms:
    """Add what the other stages of the pipeline have."""
    if scope.pipeline is None:
        return norms
    group = scope.pipeline.get_group()
    mine = {name: norm.dtype for name, norm in norms.items() if named[name] not in scope.uncounted}
    dtypes = {name: dtype for part in all_gather_object(mine, group) for name, dtype in part.items()}
    if not dtypes:
        return {}
    device = torch.device(scope.pipeline.device_type)
    zero = torch.zeros((), dtype=accumulator_dtype(device), device=device)
    stacked = torch.stack([norms[name].to(zero) if name in mine else zero for name in dtypes])
    dist.all_reduce(stacked, group=group)
    return {name: value.to(dtypes[name]) for name, value in zip(dtypes, stacked.unbind(), strict=True)}


class GradientNormLogger(Callback):
    """Logs the norm over all gradients of the job before clipping, once for each optimizer step.

    Where the Trainer clips by norm, this is the norm that clipping has computed, for free. Otherwise it is computed for
    the log, with one collective for each set of groups that parameters are sharded over. With D9DStrategy only.
    """

    def __init__(self, name: str = "grad_norm", *, prog_bar: bool = False) -> None:
        """Choose where it goes.

        Args:
            name: Key of the logged value.
            prog_bar: Whether the progress bar shows it too.
        """
        super().__init__()
        self._name = name
        self._prog_bar = prog_bar
        self._logged: torch.Tensor | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, D9DStrategy):
            # With modules: there is a D9DStrategy for each of two Lightnings, see [Note: two Lightnings].
            found = type(trainer.strategy)
            raise ValueError(
                f"{__name__}.GradientNormLogger works with {D9DStrategy.__module__}.D9DStrategy, not with "
                f"{found.__module__}.{found.__name__}. Take both from one package, or, without D9DStrategy, log "
                f"lightning.pytorch.utilities.grad_norm(module, 2) in on_before_optimizer_step instead."
            )

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if isinstance(trainer.strategy, D9DStrategy) and not clips_by_norm(pl_module):
            trainer.strategy.measure_grad_norm(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: object, batch_idx: int
    ) -> None:
        norm = trainer.strategy.last_grad_norm if isinstance(trainer.strategy, D9DStrategy) else None
        # Batches of an accumulation window take no step, and have no norm of their own.
        if norm is not None and norm is not self._logged:
            self._logged = norm
            pl_module.log(self._name, norm, prog_bar=self._prog_bar)
