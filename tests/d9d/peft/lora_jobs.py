"""Native jobs that fine-tune a checkpoint of transformers, and the same by transformers with the package peft on one process."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from d9d.loop.auto import AutoDataConfig, AutoDataProvider
from d9d.loop.control import (
    InitializeModelStageContext,
    InitializeModelStageResult,
    ModelProvider,
    ParallelizeModelStageContext,
    PrepareExportModelStageContext,
    PrepareExportModelStageResult,
)
from d9d.loop.event.catalogue.train import (
    EVENT_TRAIN_OPTIMIZER_STEP_POST,
    EVENT_TRAIN_OPTIMIZER_STEP_PRE,
    EVENT_TRAIN_READY,
)
from d9d.model_state.mapper.compose import ModelStateMapperSequential
from d9d.module.block.hidden_states_aggregator import HiddenStatesAggregationMode
from d9d.module.model import DecoderForCausalLM
from d9d.module.parallelism.api import SequenceSharding
from d9d.module.parallelism.model import parallelize_decoder
from d9d.peft import inject_peft_and_freeze
from d9d.peft.adapter_files import mapper_to_adapters, write_peft_adapter
from d9d.peft.all import PeftStackConfig, peft_method_from_config
from d9d.peft.lora import mapper_to_merged
from tests.d9d.loop.run.regression_job import Job, build_job
from tests.d9d.module.block.oracles import EverythingInDouble, randomize
from tests.d9d.module.model.catalogue import CATALOGUE
from tests.harness.parity import full
from tests.numerics.model_runs import SCHEDULES, TOKENS, Layout
from tests.numerics.resumed_jobs import GLOBAL_BATCH, SAVED_AFTER, LanguageTask, TokenData, collate

NUM_STEPS = 6
RATE, EPSILON, MAX_NORM = 1e-2, 1e-4, 0.5
MODEL = "qwen3 dense"
PARAMS = {"r": 2, "alpha": 6, "dropout": 0.0}
ADAPTERS = {
    "kind": "lora",
    "module_name_pattern": r"backbone\.layers\.\d\.(self_attn\.(q|v|o)_proj|mlp\.(up|down)_proj)",
    "params": PARAMS,
}
METHODS = {
    "adapters": PeftStackConfig.model_validate({"methods": [ADAPTERS]}),
    "adapters and the head": PeftStackConfig.model_validate(
        {"methods": [ADAPTERS, {"kind": "full_tune", "module_name_pattern": r"head|backbone\.norm"}]}
    ),
}
"""The same for the package: modules with adapters, and those that train in full."""
THEIR_ADAPTERS = r".*\.(q|v|o|up|down)_proj"
THEIR_WHOLE = {"adapters": None, "adapters and the head": ["lm_head", "model.norm"]}

State = dict[str, torch.Tensor]


@dataclasses.dataclass(kw_only=True)
class Trained:
    """What trains, by name: before the first step, and the gradients and values of each step."""

    start: State = dataclasses.field(default_factory=dict)
    gradients: list[State] = dataclasses.field(default_factory=list)
    values: list[State] = dataclasses.field(default_factory=list)


class Provider(ModelProvider[Any]):
    """As docs/peft.md has it."""

    def __init__(self, method: str, layout: Layout) -> None:
        self._method, self._layout, self._row = peft_method_from_config(METHODS[method]), layout, CATALOGUE[MODEL]
        self.exports: Literal["merged", "adapters"] = "merged"

    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[Any]:
        backbone = self._row.model(self._row.params(False), context.stage, HiddenStatesAggregationMode.no, False)
        model = DecoderForCausalLM(backbone, context.stage).double()
        load = self._row.mapper(self._row.causal_lm.load, False, stage=context.stage)
        mapper = ModelStateMapperSequential([load, inject_peft_and_freeze(self._method, model)])
        return InitializeModelStageResult(model=model, state_mapper=mapper, keep=["*.lora_[AB].weight"])

    def parallelize_model_stage(self, context: ParallelizeModelStageContext[Any]) -> None:
        parallelize_decoder(
            context.dist_context, context.model, context.stage, sequence_parallel=self._layout.sequence_parallel
        )

    def prepare_export_model_stage(self, context: PrepareExportModelStageContext[Any]) -> PrepareExportModelStageResult:
        export = self._row.mapper(self._row.causal_lm.export, False, stage=context.model.backbone.stage)
        if self.exports == "adapters":
            return PrepareExportModelStageResult(state_mapper=mapper_to_adapters(context.model, export))
        return PrepareExportModelStageResult(
            state_mapper=ModelStateMapperSequential([mapper_to_merged(context.model), export])
        )


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def build(method: str, layout: Layout, folder: Path, saved: Path, *, saves: bool) -> tuple[Job, Provider, Trained]:
    """Build a job that loads the base weights from ``source`` beside its folder, and notes what trains."""
    provider = Provider(method, layout)
    sharding = SequenceSharding.of(layout.mesh.build())
    job = build_job(
        layout.mesh,
        folder,
        total_steps=NUM_STEPS,
        model_provider=provider,
        data_provider=AutoDataProvider(
            lambda context: TokenData(),
            collate,
            AutoDataConfig(global_batch_size=GLOBAL_BATCH, microbatch_size=2, num_workers=0, pin_memory=False),
        ),
        optimizer={"name": "adamw", "lr": RATE, "eps": EPSILON},
        task_class=lambda weight: LanguageTask(sharding),
        overrides={
            "pipelining": {"schedule": SCHEDULES[layout.schedule]},
            "checkpointing": {"save_dir": str(saved), "period_steps": SAVED_AFTER if saves else "disable"},
            "model_stage_factory": {
                "source_checkpoint": str(folder.parent / "source"),
                "checkpoint_only_trainable_parameters": True,
            },
            "gradient_clipping": {"max_norm": MAX_NORM},
        },
    )
    noted = Trained()
    bus = job.trainer._state.event_bus
    bus.subscribe(EVENT_TRAIN_READY, lambda context: noted.start.update(values_of(job)))
    bus.subscribe(EVENT_TRAIN_OPTIMIZER_STEP_PRE, lambda context: noted.gradients.append(gradients_of(job)))
    bus.subscribe(EVENT_TRAIN_OPTIMIZER_STEP_POST, lambda context: noted.values.append(values_of(job)))
    return job, provider, noted


def trained_parameters(job: Job) -> dict[str, nn.Parameter]:
    modules = job.trainer._state.tracked_modules.modules
    return {name: each for module in modules for name, each in module.named_parameters() if each.requires_grad}


def values_of(job: Job) -> State:
    return {name: full(each.detach()).clone() for name, each in trained_parameters(job).items()}


def gradients_of(job: Job) -> State:
    found = {name: each.grad for name, each in trained_parameters(job).items()}
    return {name: full(each.detach()).clone() for name, each in found.items() if each is not None}


def train(method: str, layout: Layout, folder: Path) -> None:
    """Train to the end, and export both ways."""
    job, provider, noted = build(method, layout, folder / "whole", folder / "saved", saves=True)
    job.trainer.train()
    torch.save(dataclasses.asdict(noted), folder / f"whole-{rank()}.pt")
    job.trainer.export(folder / "merged", load_checkpoint=False)
    provider.exports = "adapters"
    job.trainer.export(folder / "exported", load_checkpoint=False)
    if rank() == 0:
        shutil.copy(folder / "source" / "config.json", folder / "merged")
        write_peft_adapter(folder / "exported", folder / "adapter", METHODS[method])


def resume(method: str, layout: Layout, folder: Path, name: str) -> None:
    """Go on from the checkpoint, by new processes and maybe on another mesh."""
    job, _, noted = build(method, layout, folder / name, folder / "saved", saves=False)
    job.trainer.train()
    torch.save(dataclasses.asdict(noted), folder / f"{name}-{rank()}.pt")


def collected(folder: Path, name: str) -> Trained:
    """Return what all ranks have noted."""
    merged = Trained()
    for path in sorted(folder.glob(f"{name}-?.pt")):
        part = Trained(**torch.load(path, weights_only=True))
        merged.start |= part.start
        for ours, others in ((merged.gradients, part.gradients), (merged.values, part.values)):
            ours.extend({} for _ in range(len(others) - len(ours)))
            for step, state in enumerate(others):
                ours[step] |= state
    return merged


def write_source(folder: Path) -> None:
    """Write a checkpoint of transformers with random weights, in fp64."""
    model: Any = CATALOGUE[MODEL].build_theirs("ForCausalLM", False).double()
    randomize(model)
    model.save_pretrained(folder / "source")


def load_theirs(folder: Path) -> Any:
    """Load a checkpoint of transformers, which shall miss nothing and know everything."""
    row = CATALOGUE[MODEL]
    model_class = getattr(row.theirs(), f"{row.prefix}ForCausalLM")
    with EverythingInDouble():  # angles of rotary embeddings too
        model, info = model_class.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


def their_name(name: str) -> str:
    """Return what the package calls a parameter that trains; a vocabulary is a part of one there."""
    if name.startswith("head.lm_head."):
        return "base_model.model.lm_head.modules_to_save.default.weight"
    name = f"base_model.model.{name.replace('backbone.', 'model.')}"
    if ".lora_" not in name:
        return name.replace(".weight", ".modules_to_save.default.weight")
    return name.replace(".weight", ".default.weight")


def as_ours(state: State, names: State) -> State:
    """Cut what the package has into our parameters."""
    cut: State = {}
    rows = 0
    for name in names:
        whole = state[their_name(name)]
        if name.startswith("head.lm_head."):
            whole = whole[rows : rows + len(names[name])]
            rows += len(whole)
        cut[name] = whole.detach().clone()
    return cut


def ordered(names: State) -> State:
    """Put vocabularies into the order of their rows."""
    return {name: names[name] for name in sorted(names, key=lambda name: ("head" in name, "added" in name))}


def train_theirs(method: str, folder: Path, start: State) -> tuple[Any, list[float], Trained]:
    """Train by transformers and peft in plain PyTorch, each step on its whole batch, from the same first adapters."""
    import peft

    model = peft.get_peft_model(
        load_theirs(folder / "source"),
        peft.LoraConfig(
            r=PARAMS["r"],
            lora_alpha=PARAMS["alpha"],
            target_modules=THEIR_ADAPTERS,
            modules_to_save=THEIR_WHOLE[method],
        ),
    ).double()
    own = dict(model.named_parameters())
    start = ordered(start)
    with torch.no_grad():
        for name, value in start.items():
            if "lora_" in name:
                own[their_name(name)].copy_(value)
    parameters = {name: each for name, each in own.items() if each.requires_grad}
    assert parameters.keys() == {their_name(name) for name in start}
    noted = Trained(start=as_ours(own, start))
    losses: list[float] = []
    optimizer = torch.optim.AdamW(parameters.values(), lr=RATE, eps=EPSILON, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.9 * step / NUM_STEPS)
    data = TokenData()
    for step in range(NUM_STEPS):
        ids = torch.stack([data[step * GLOBAL_BATCH + index].ids for index in range(GLOBAL_BATCH)])
        assert ids.shape == (GLOBAL_BATCH, TOKENS + 1)
        with EverythingInDouble():
            logits = model(input_ids=ids[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM)
        noted.gradients.append(as_ours({name: each.grad for name, each in parameters.items()}, start))
        optimizer.step()
        scheduler.step()
        noted.values.append(as_ours({name: each.detach() for name, each in parameters.items()}, start))
    return model.eval(), losses, noted
