"""Find what of a module does not fit a mesh, before any process group exists."""

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.tensor import DTensor

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.protocol import ChecksMesh
from d9d.module.parallelism.plan import ParallelPlan, resolve_plan
from d9d_lightning.placements.parallelize import mesh_of

__all__ = ["check_mesh"]

_NO_USERS = ("lightning", "pytorch_lightning", __name__.partition(".")[0])
"""Packages whose ``setup`` hooks build no layers."""


def check_mesh(
    module: LightningModule, plan: ParallelPlan, mesh: DeviceMeshParameters, trainer: Trainer | None = None
) -> None:
    """Refuse a module that a mesh is not for. No communication.

    A module with a method ``mesh_problems(mesh)`` (`ChecksMesh`) is asked. Where a plan splits layers that are there already, it is
    resolved. Not so where hooks that have not run yet may build others, ``configure_model`` or a ``setup`` of the user's:
    then only when the ranks are connected, as all plans are. A module that an earlier run has distributed is left alone.

    Args:
        module: Whole, as the user has built it, or as an earlier run has left it.
        plan: How it will be distributed.
        mesh: Parallelism degrees.
        trainer: Will run the module; its callbacks and its data module may build layers too. None: nobody else does.

    Raises:
        ValueError: With all that is wrong with the module; or with the plan.
    """
    was_split, earlier = any(isinstance(parameter, DTensor) for parameter in module.parameters()), mesh_of(module)
    if earlier is not None and (was_split or earlier == mesh):
        return  # what it says of itself now may be that of a part; another mesh is refused later
    problems = module.mesh_problems(mesh) if isinstance(module, ChecksMesh) else []
    if problems:
        listed = "\n".join(f"- {text}" for text in problems)
        raise ValueError(f"{type(module).__name__} does not fit the mesh:\n{listed}")
    has_splits = mesh.has_tensor_parallel or mesh.has_expert_parallel
    is_open = callable(plan.parallelize) or _may_build_layers(module, trainer)
    if has_splits and not is_open and not was_split:
        resolve_plan(module, plan, mesh)


def _may_build_layers(module: LightningModule, trainer: Trainer | None) -> bool:
    hooked: list[LightningModule | LightningDataModule | Callback] = [module]
    if trainer is not None:
        hooked += vars(trainer)["callbacks"]  # Lightning does not declare it
        hooked += [] if trainer.datamodule is None else [trainer.datamodule]  # pyright: ignore[reportAttributeAccessIssue]  # set elsewhere
    # By the function, since a `LambdaCallback` has it on the instance.
    hooks = (each.setup.__module__.partition(".")[0] for each in hooked)
    return is_overridden("configure_model", module) or any(package not in _NO_USERS for package in hooks)
