"""What the start of a training job and of an inference job have in common."""

from typing import Any

from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.internals.determinism import set_seeds
from d9d.loop.component import TimeoutManager
from d9d.loop.config import InferenceConfig, TrainerConfig
from d9d.loop.control import ModelProvider
from d9d.loop.run.job_agreement import agree_on_config
from d9d.loop.run.job_check import refuse_problems


def start_job(
    mesh: DeviceMeshParameters,
    config: TrainerConfig | InferenceConfig,
    model_provider: ModelProvider[Any],  # Any: only the job knows its model
    data_provider: object,
) -> tuple[DistributedContext, TimeoutManager]:
    """Check a job, then connect its ranks, seed them and give them time to start up. All ranks must call it.

    Args:
        mesh: Parallelism degrees.
        config: Settings of the loop.
        model_provider: Says whether its model fits the mesh.
        data_provider: Checked against the mesh if it offers that.

    Raises:
        ValueError: With all problems of the configuration, before any process group exists; or if ranks have others.
    """
    refuse_problems(mesh, config, model_provider, data_provider)
    context = mesh.build()
    set_seeds(context, config.determinism.base_seed)
    timeouts = TimeoutManager(context, config.timeout)
    timeouts.set_init()
    agree_on_config(context, config)
    return context, timeouts
