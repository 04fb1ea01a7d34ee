"""Lightning front end: a Trainer strategy that drives the d9d engine."""

try:
    from d9d._installation import refuse_foreign_d9d
except ModuleNotFoundError as error:
    raise ImportError(
        f"The `d9d` package that Python finds is not the one of d9d-lightning ({error}). If PyPI's 'd9d' is installed: "
        "`pip uninstall d9d`, then `pip install --force-reinstall --no-deps d9d-lightning`."
    ) from error

# Again, though `d9d` has called it: where PyPI's files came last, its own __init__ has replaced ours.
refuse_foreign_d9d()

from d9d.core.dist_context import DeviceMeshParameters  # noqa: E402
from d9d_lightning.checkpoints.whole import consolidate, read_checkpoint, register_folders  # noqa: E402
from d9d_lightning.gradients.norms import grad_norm  # noqa: E402
from d9d_lightning.pipeline.stages import PipelineStages, measure_layer_costs  # noqa: E402
from d9d_lightning.registry import register  # noqa: E402
from d9d_lightning.strategy import D9DStrategy  # noqa: E402

__all__ = [
    "D9DStrategy",
    "DeviceMeshParameters",
    "PipelineStages",
    "consolidate",
    "grad_norm",
    "measure_layer_costs",
    "read_checkpoint",
    "register",
]

register_folders()
