"""Activation checkpointing and compilation of blocks: the gradients of before, what is kept, what is computed again."""

import copy
import shutil
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from d9d.loop.control import (
    InitializeModelStageContext,
    InitializeModelStageResult,
    ParallelizeModelStageContext,
)
from d9d.module.block.hidden_states_aggregator import HiddenStatesAggregationMode
from d9d.module.compilation import compile_blocks
from d9d.module.model.decoder import Decoder
from d9d.module.model.io import SequenceInput, SequenceShared
from d9d.module.recompute import SelectiveCheckpointing, checkpoint_blocks
from d9d.pipelining.api import PipelineStageInfo
from tests.d9d.module.block.oracles import randomize
from tests.d9d.module.model.catalogue import CATALOGUE
from tests.harness.parity import assert_close_tree
from tests.numerics.model_runs import Layout, Provider, run_engine, run_plainly

DENSE, MOE = "qwen3 dense", "qwen3 moe"
TOLERANCE = {"rtol": 0.0, "atol": 1e-10}
SELECTIONS: dict[str, bool | SelectiveCheckpointing] = {
    "nothing": False,
    "layers": True,
    "operations": SelectiveCheckpointing(),
    "attention": SelectiveCheckpointing(saved_ops=("aten._scaled_dot_product_flash_attention_for_cpu",)),
}


class Watcher(TorchDispatchMode):
    """Counts operations, and knows which of the tensors that they make are still in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.counts[func.overloadpacket.__name__] += 1
        known = {tensor.untyped_storage()._cdata for tensor in args if isinstance(tensor, torch.Tensor)}
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in known:
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def living_bytes(self) -> int:
        return sum(size for reference, size in self._made.values() if not reference.expired())


def decoder(name: str, checkpointing: bool | SelectiveCheckpointing) -> Decoder:
    row = CATALOGUE[name]
    model = row.model(
        row.params(False), PipelineStageInfo(0, 1), HiddenStatesAggregationMode.no, checkpointing
    ).double()
    randomize(model)
    return model


def run(model: Decoder) -> torch.Tensor:
    ids = torch.arange(24).view(2, 12)
    positions = torch.arange(12).expand(2, 12)
    return model(SequenceInput(input_ids=ids), SequenceShared(position_ids=positions)).hidden_states


def watched_step(model: Decoder) -> tuple[int, Watcher, dict[str, torch.Tensor]]:
    """Bytes that are kept for the backward pass, all operations of both passes, and the gradients."""
    with Watcher() as watcher:
        states = run(model)
        kept = watcher.living_bytes()
        states.sin().sum().backward()
    return kept, watcher, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", [DENSE, MOE])
def test_gradients_memory_and_work(name: str):
    steps = {kind: watched_step(decoder(name, selection)) for kind, selection in SELECTIONS.items()}
    for _, _, gradients in steps.values():
        torch.testing.assert_close(gradients, steps["nothing"][2], rtol=0, atol=0)
    kept = {kind: step[0] for kind, step in steps.items()}
    assert kept["layers"] < kept["attention"] < kept["operations"] < 0.6 * kept["nothing"]
    products = {kind: step[1].counts["mm"] for kind, step in steps.items()}
    attentions = {kind: step[1].counts["_scaled_dot_product_flash_attention_for_cpu"] for kind, step in steps.items()}
    assert products["operations"] == products["nothing"] < products["attention"] == products["layers"]
    assert attentions["operations"] == attentions["attention"] == attentions["nothing"] == attentions["layers"] // 2


def test_without_gradients_nothing_is_computed_again():
    model = decoder(DENSE, True)
    with torch.no_grad(), Watcher() as watcher:
        assert torch.equal(run(model), run(decoder(DENSE, False)))
    assert watcher.counts["mm"] > 0


def test_dropout_is_drawn_again_alike():
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    expected = copy.deepcopy(block)
    checkpoint_blocks([block], SelectiveCheckpointing())
    x = torch.randn(4, 8)
    for each in (block, expected):
        torch.manual_seed(1)
        each(x).sum().backward()
    assert_close_tree(
        [parameter.grad for parameter in block.parameters()],
        [parameter.grad for parameter in expected.parameters()],
        rtol=0.0,
        atol=0.0,
    )


def test_copies_have_their_own_weights():
    for change in (checkpoint_blocks, lambda blocks: compile_blocks(blocks, backend="eager")):
        block = nn.Linear(4, 4)
        change([block])
        other = copy.deepcopy(block)
        with torch.no_grad():
            other.weight.zero_()
            other.bias.zero_()
        x = torch.ones(1, 4)
        assert block(x).any()
        assert not other(x).any()


def test_unknown_operations_are_refused():
    with pytest.raises(ValueError, match=r"torch\.ops has no operation 'aten\.mmm'"):
        SelectiveCheckpointing(saved_ops=("aten.mmm",))
    with pytest.raises(ValueError, match="'mm'"):
        SelectiveCheckpointing(saved_ops=("mm",))


@pytest.mark.parametrize("checkpointing", SELECTIONS)
def test_compiled_blocks(checkpointing: str):
    model, expected = decoder(DENSE, SELECTIONS[checkpointing]), decoder(DENSE, False)
    torch.compiler.reset()  # the limit of recompilations counts those of other tests
    compile_blocks(model.decoder_layers, backend="aot_eager", fullgraph=True)
    outputs = [run(each) for each in (model, expected)]
    torch.testing.assert_close(*outputs, **TOLERANCE)
    for output in outputs:
        output.sin().sum().backward()
    assert_close_tree(
        {name: parameter.grad for name, parameter in model.named_parameters()},
        {name: parameter.grad for name, parameter in expected.named_parameters()},
        **TOLERANCE,
    )


@pytest.mark.exhaustive  # some seconds of a C++ compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_code_of_the_default_compiler():
    model, expected = decoder(DENSE, False), decoder(DENSE, False)
    torch.compiler.reset()
    compile_blocks(model.decoder_layers)
    torch.testing.assert_close(run(model), run(expected), **TOLERANCE)


class SelectiveProvider(Provider):
    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[Any]:
        result = super().initialize_model_stage(context)
        checkpoint_blocks(result.model.backbone.decoder_layers, SelectiveCheckpointing())
        return result


class FullProvider(Provider):
    def initialize_model_stage(self, context: InitializeModelStageContext) -> InitializeModelStageResult[Any]:
        result = super().initialize_model_stage(context)
        checkpoint_blocks(result.model.backbone.decoder_layers)
        return result


class CompiledProvider(Provider):
    def parallelize_model_stage(self, context: ParallelizeModelStageContext[Any]) -> None:
        super().parallelize_model_stage(context)
        compile_blocks(context.model.backbone.decoder_layers, backend="aot_eager")


class CompiledSelectiveProvider(CompiledProvider, SelectiveProvider):
    pass


LAYOUTS = {
    "shard 2": (DENSE, Layout(degrees={"data_parallel_shard": 2})),
    "tp 2": (DENSE, Layout(degrees={"tensor_parallel": 2}, sequence_parallel=True)),
    "cp 2": (DENSE, Layout(degrees={"context_parallel_shard": 2})),
    "ep 2": (MOE, Layout(degrees={"data_parallel_replicate": 2, "expert_parallel": 2})),
    "pp 2": (DENSE, Layout(degrees={"pipeline_parallel": 2}, schedule="zero_bubble_v")),
    "tp 2 x shard 2": (
        DENSE,
        Layout(degrees={"tensor_parallel": 2, "data_parallel_shard": 2}, sequence_parallel=True),
    ),
    "tp 2 x ep 2": (
        MOE,
        Layout(degrees={"tensor_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 2}),
    ),
}
PROVIDERS = {
    "full": FullProvider,
    "selective": SelectiveProvider,
    "compiled": CompiledProvider,
    "both": CompiledSelectiveProvider,
}
DEFAULT = {("ep 2", "both"), ("pp 2", "selective"), ("tp 2 x shard 2", "both")}
"""What runs each time. All else is exhaustive."""


LIMIT_S = 600.0  # compiled experts are traced anew for other numbers of tokens


def cases(num_ranks: int) -> list[object]:
    return [
        pytest.param(layout, provider, marks=[] if (layout, provider) in DEFAULT else [pytest.mark.exhaustive])
        for layout, (_, described) in LAYOUTS.items()
        if described.mesh.world_size == num_ranks
        for provider in PROVIDERS
    ]


@pytest.mark.world_size(2, timeout_s=LIMIT_S)
@pytest.mark.parametrize(("layout", "provider"), cases(2))
def test_steps_on_two_ranks(layout: str, provider: str):
    check_steps(layout, provider)


@pytest.mark.world_size(4, timeout_s=LIMIT_S)
@pytest.mark.parametrize(("layout", "provider"), cases(4))
def test_steps_on_four_ranks(layout: str, provider: str):
    check_steps(layout, provider)


def check_steps(layout: str, provider: str) -> None:
    torch.compiler.reset()
    name, described = LAYOUTS[layout]
    expected = run_plainly(name, torch.float64)
    found = run_engine(name, torch.float64, described, PROVIDERS[provider])
    assert found.losses == pytest.approx(expected.losses, rel=0, abs=TOLERANCE["atol"])
    for ours, right in ((found.gradients, expected.gradients), (found.parameters, expected.parameters)):
        assert_close_tree(ours, {key: right[key] for key in ours}, **TOLERANCE)
