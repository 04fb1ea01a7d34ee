"""Find what of a module does not fit a mesh, before any process group exists."""

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.tensor import DTensor

from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.protocol import ChecksMesh
from d9d.module.parallelism.plan import ParallelPlan, resolve_plan

__all__ = ["check_mesh"]


def check_mesh(module: LightningModule, plan: ParallelPlan, mesh: DeviceMeshParameters) -> None:
    """Refuse a module that a mesh is not for. No communication.

    A module with a method ``mesh_problems(mesh)`` (`ChecksMesh`) is asked. Where a plan splits layers that are there already, it is
    resolved, which is done again when the ranks are connected: ``configure_model`` may build others.

    Args:
        module: Whole, as the user has built it, or as an earlier run has left it.
        plan: How it will be distributed.
        mesh: Parallelism degrees.

    Raises:
        ValueError: With all that is wrong with the module; or with the plan.
    """
    problems = module.mesh_problems(mesh) if isinstance(module, ChecksMesh) else []
    if problems:
        listed = "\n".join(f"- {text}" for text in problems)
        raise ValueError(f"{type(module).__name__} does not fit the mesh:\n{listed}")
    has_splits = mesh.has_tensor_parallel or mesh.has_expert_parallel
    is_open = callable(plan.parallelize) or is_overridden("configure_model", module)
    was_split = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    if has_splits and not is_open and not was_split:
        resolve_plan(module, plan, mesh)
