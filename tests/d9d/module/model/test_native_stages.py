"""Stages of the catalogue as the native trainer builds them: on meta, distributed, loaded from one file and exported to one."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.component.model_stage import ModelStageFactory
from d9d.loop.component.model_states import ModelStageExporter
from d9d.loop.config import ModelStageFactoryConfig, PipeliningConfig
from d9d.loop.control import (
    InitializeModelStageContext,
    InitializeModelStageResult,
    ModelProvider,
    ParallelizeModelStageContext,
    PrepareExportModelStageContext,
    PrepareExportModelStageResult,
)
from d9d.model_state.io import save_model_state
from d9d.module.model import DecoderForCausalLM
from d9d.module.parallelism.model import parallelize_decoder
from d9d.pipelining.api import PipelineStageInfo
from tests.d9d.module.block.oracles import randomize
from tests.d9d.module.model.catalogue import CATALOGUE
from tests.harness.parity import assert_close_tree, named_full_parameters


class Provider(ModelProvider[Any]):
    """Builds a model of the catalogue, with tied embeddings."""

    def __init__(self, name: str) -> None:
        self._row = CATALOGUE[name]

    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[Any]:
        model = DecoderForCausalLM(self._row.build(True, context.stage), context.stage)
        mapper = self._row.mapper(self._row.causal_lm.load, True, stage=context.stage)
        return InitializeModelStageResult(model=model, state_mapper=mapper)

    def parallelize_model_stage(self, context: ParallelizeModelStageContext[Any]) -> None:
        parallelize_decoder(context.dist_context, context.model, context.stage)

    def prepare_export_model_stage(self, context: PrepareExportModelStageContext[Any]) -> PrepareExportModelStageResult:
        stage = context.model.backbone.stage
        return PrepareExportModelStageResult(
            state_mapper=self._row.mapper(self._row.causal_lm.export, True, stage=stage)
        )


@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("degrees", [{"tensor_parallel": 2}, {"data_parallel_shard": 2, "expert_parallel": 2}])
def test_stages_load_and_export_one_file(name: str, degrees: dict[str, int], tmp_path: Path):
    """Embeddings are in the first of two stages, the head that has their weights in the last one."""
    row = CATALOGUE[name]
    single = DecoderForCausalLM(row.build(True), PipelineStageInfo(0, 1))
    randomize(single)
    save_model_state(tmp_path / "source", row.mapper(row.causal_lm.export, True), single, show_progress=False)
    context = DeviceMeshParameters(pipeline_parallel=2, **degrees).build()
    provider = Provider(name)
    config = ModelStageFactoryConfig(source_checkpoint=tmp_path / "source")
    pipelining = PipeliningConfig(schedule={"schedule": "1f1b", "num_stages_per_rank": 1, "zero_bubble": False})
    _, modules = ModelStageFactory(provider, context, config, pipelining).build_pipeline_and_modules()
    expected = named_full_parameters(single)
    expected |= {f"head.lm_head.{key}.weight": table.weight for key, table in single.head.lm_head.items()}
    for module in modules.modules:
        found = named_full_parameters(module)
        assert_close_tree(found, {key: expected[key].detach() for key in found}, rtol=0.0, atol=0.0)
    ModelStageExporter(provider, modules, context).export(tmp_path / "export")
    dist.barrier()
    written = [load_file(file) for file in sorted((tmp_path / "export").glob("*.safetensors"))]
    source = load_file(tmp_path / "source" / "model.safetensors")
    assert_close_tree({key: value for part in written for key, value in part.items()}, source, rtol=0.0, atol=0.0)
