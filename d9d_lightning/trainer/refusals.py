"""Lightning callbacks that would be wrong, or hang, where a module is distributed."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, StochasticWeightAveraging, WeightAveraging
from torch.distributed.tensor import DTensor

from d9d.core.dist_context import DeviceMeshParameters

_SPLITTING = (
    "pipeline_parallel",
    "data_parallel_shard",
    "context_parallel_shard",
    "tensor_parallel",
    "expert_parallel",
)
"""Degrees that leave each rank with a part of the weights."""


def check_callbacks(trainer: Trainer, params: DeviceMeshParameters, module: LightningModule) -> None:
    """Refuse the callbacks of a Trainer that cannot work on a mesh. No communication.

    Args:
        trainer: With all callbacks, those of the module included.
        params: Parallelism degrees of the job.
        module: Distributed or not yet.

    Raises:
        NotImplementedError: With all of them, the reasons, and what to use instead.
    """
    split = [f"{name}={degree}" for name, degree in params.model_dump().items() if name in _SPLITTING and degree > 1]
    if not split and any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        split = ["distributed parameters"]
    callbacks: list[Callback] = vars(trainer)["callbacks"]  # Lightning does not declare it
    problems = [
        problem
        for callback in callbacks
        if (problem := _problem(callback, ", ".join(split), params.is_distributed)) is not None
    ]
    if problems:
        raise NotImplementedError(" ".join(problems))


def _problem(callback: Callback, split: str, is_distributed: bool) -> str | None:
    match callback:
        case StochasticWeightAveraging() if split:
            return (
                f"StochasticWeightAveraging copies the whole module, and computes with the copy, which cannot work with "
                f"{split}. Use d9d_lightning.callbacks.EMAWeightAveraging(decay=None, update_starting_at_step=...), "
                f"which averages shards in place, and set the learning rate by a scheduler."
            )
        case WeightAveraging() if split:
            return (
                f"lightning's {type(callback).__name__} copies the whole module, which cannot work with {split}. Use "
                f"d9d_lightning.callbacks.EMAWeightAveraging, which averages shards in place."
            )
        case BatchSizeFinder() if is_distributed:
            return (
                f"{type(callback).__name__} (also Tuner.scale_batch_size) tries batch sizes until memory runs out, which "
                f"ranks do at different times. Find the size on one process without D9DStrategy."
            )
        case _:
            return None
