"""Find degrees of a mesh that heads, experts or layers of a model can not be shared by, from its config alone."""

from collections.abc import Callable

from d9d.core.dist_context import DeviceMeshParameters
from d9d.module.block.moe.all_to_all import check_expert_parallel
from d9d.module.model.decoder import layers_of_stage
from d9d.module.model.parameters import DecoderParameters
from d9d.module.parallelism.tensor_blocks import check_tensor_parallel_heads
from d9d.pipelining.api import PipelineStageInfo

__all__ = ["decoder_mesh_problems"]


def decoder_mesh_problems(
    params: DecoderParameters,
    mesh: DeviceMeshParameters,
    num_stages: int | None = None,
    *,
    replicate_kv_heads: bool = False,
) -> list[str]:
    """Say what of a decoder its ranks can not share, each with its numbers and the degrees that can.

    These are heads among ``tp``, experts among ``ep``, and layers among pipeline stages. All else that `parallelize_decoder`
    refuses, such as means of hidden states that ``tp`` would take over parts of the tokens, it says itself once stages are built.

    Needs no process group: for ``ModelProvider.mesh_problems``, and for that of a LightningModule.

    Args:
        params: The whole model.
        mesh: Parallelism degrees.
        num_stages: Number of stages of the pipeline; None for one on each rank.
        replicate_kv_heads: Whether ``tp`` may have more ranks than there are key and value heads.
    """
    counts = params.shared_counts()
    stage = PipelineStageInfo(0, num_stages or mesh.pipeline_parallel)
    checks: list[Callable[[], object]] = [
        lambda: check_tensor_parallel_heads(
            counts.num_heads, counts.num_kv_heads, mesh.tensor_parallel, replicate_kv_heads=replicate_kv_heads
        ),
        lambda: check_expert_parallel(counts.num_experts or mesh.expert_parallel, mesh.expert_parallel),
        lambda: layers_of_stage(params, stage),
    ]
    return [problem for check in checks for problem in _said_by(check)]


def _said_by(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except ValueError as error:
        return [str(error)]
    return []
