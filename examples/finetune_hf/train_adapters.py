"""The same with adapters: `torchrun --nproc-per-node 2 .../train_adapters.py`."""

import os

import peft
from train import CONFIG, HF_CONFIG, RUNS, SOURCE, Provider, build_trainer, load_by_transformers, loss_of

from d9d.loop.control import (
    InitializeModelStageContext,
    InitializeModelStageResult,
    PrepareExportModelStageContext,
    PrepareExportModelStageResult,
)
from d9d.model_state.mapper.compose import ModelStateMapperSequential
from d9d.peft import inject_peft_and_freeze
from d9d.peft.adapter_files import mapper_to_adapters, write_peft_adapter
from d9d.peft.all import PeftStackConfig, peft_method_from_config
from d9d.peft.lora import mapper_to_merged

MERGED, EXPORTED, ADAPTER = RUNS / "merged", RUNS / "exported_adapter", RUNS / "adapter"

METHOD = PeftStackConfig.model_validate(
    {
        "methods": [
            {
                "kind": "lora",
                "module_name_pattern": r".*\.self_attn\.[qkvo]_proj",
                "params": {"r": 4, "alpha": 8, "dropout": 0.0},
            },
            {"kind": "full_tune", "module_name_pattern": "head"},
        ]
    }
)


class AdaptedProvider(Provider):
    exports_adapters = False

    # Adapters are put in before the model is distributed, and no file has values for them.
    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult:
        result = super().initialize_model_stage(context)
        renamed = inject_peft_and_freeze(peft_method_from_config(METHOD), result.model)
        result.state_mapper = ModelStateMapperSequential([result.state_mapper, renamed])
        result.keep = ["*.lora_[AB].weight"]
        return result

    def prepare_export_model_stage(self, context: PrepareExportModelStageContext) -> PrepareExportModelStageResult:
        to_huggingface = super().prepare_export_model_stage(context).state_mapper
        if self.exports_adapters:
            return PrepareExportModelStageResult(state_mapper=mapper_to_adapters(context.model, to_huggingface))
        merged = ModelStateMapperSequential([mapper_to_merged(context.model), to_huggingface])
        return PrepareExportModelStageResult(state_mapper=merged)


def main() -> None:
    stages = CONFIG.model_stage_factory.model_copy(update={"checkpoint_only_trainable_parameters": True})
    provider = AdaptedProvider()
    trainer = build_trainer(provider, CONFIG.model_copy(update={"model_stage_factory": stages}))
    trainer.train()
    trainer.export(MERGED, load_checkpoint=False)
    provider.exports_adapters = True
    trainer.export(EXPORTED, load_checkpoint=False)
    if os.environ["RANK"] == "0":
        HF_CONFIG.save_pretrained(MERGED)
        write_peft_adapter(EXPORTED, ADAPTER, METHOD, base_model=str(SOURCE))
        adapted = peft.PeftModel.from_pretrained(load_by_transformers(SOURCE), ADAPTER)
        before, merged = (loss_of(load_by_transformers(folder)) for folder in (SOURCE, MERGED))
        print(
            f"loss: {before:.4f} of the source, {merged:.4f} of {MERGED}, {loss_of(adapted):.4f} of {ADAPTER} by peft"
        )


if __name__ == "__main__":
    main()
