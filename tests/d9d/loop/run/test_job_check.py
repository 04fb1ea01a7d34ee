"""All problems of a configuration come in one error, before any process group exists."""

import pytest
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from tests.d9d.loop.run.regression_job import build_job


def test_all_problems_come_at_once_and_early(tmp_path):
    mesh = DeviceMeshParameters(data_parallel_shard=3, pipeline_parallel=2)
    overrides = {"model_stage_factory": {"source_checkpoint": str(tmp_path)}}
    with pytest.raises(ValueError, match="cannot run as it is configured") as caught:
        build_job(mesh, tmp_path, overrides=overrides)
    text = str(caught.value)
    # 16 samples over 3 ranks in microbatches of 2: rounds of 6, so 12 or 18 fit.
    for part in ("needs 6 processes", "runs 1", "pipeline_parallel (2)", "source_checkpoint", "Use 12 or 18"):
        assert part in text, part
    assert not dist.is_initialized()
