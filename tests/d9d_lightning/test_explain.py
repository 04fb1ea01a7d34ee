"""The table of placements: what it says beforehand is what it reads afterwards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d.core.module_names import collapse_numbers
from d9d.module.parallelism.explain import predict_layouts, read_layouts
from d9d.module.parallelism.plan import ParallelPlan, resolve_plan
from d9d_lightning import D9DStrategy
from d9d_lightning.placements.explain import steps_line
from tests.d9d_lightning.support import seeded
from tests.d9d_lightning.test_tensor_parallel import MESHES, PLAN, Classifier, Tied, train


def test_numbers_collapse_one_at_a_time():
    names = [f"a.{block}.b.{layer}.w" for block in range(3) for layer in (0, 2)] + ["a.4.b.0.w", "c.0.w", "d"]
    groups = collapse_numbers({name: name == "c.0.w" for name in names})
    assert [group.name for group in groups] == ["a.{0-2,4}.b.0.w", "a.{0-2}.b.2.w", "c.0.w", "d"]
    assert groups[1].members == ("a.0.b.2.w", "a.1.b.2.w", "a.2.b.2.w")
    assert [group.name for group in collapse_numbers(dict.fromkeys(["x.0.w", "x.1.w"], 1))] == ["x.{0-1}.w"]
    assert [group.name for group in collapse_numbers({"x.0.w": 1, "x.1.w": 2})] == ["x.0.w", "x.1.w"]


def test_bytes_by_hand():
    """An embedding of 11 x 8 floats: 352 bytes, 6 of 11 rows for the first of two peers, of these 3 on each shard."""
    module = Classifier()
    module.norm.weight.requires_grad_(False)
    text = D9DStrategy({"tensor_parallel": 2, "data_parallel_shard": 2}, PLAN).explain(module)
    head, *_ = text.split("\n")
    rows = {line.split()[0]: line for line in text.split("\n")[3:]}
    assert head == "mesh: data_parallel_shard 2 x tensor_parallel 2 (4 processes)"
    cells = [cell for cell in rows["embed.weight"].split("  ") if cell]
    assert [cell.strip() for cell in cells] == [
        "embed.weight",
        "11x8",
        "dense",
        "dp_cp_shard dim 0, tp dim 0",
        "float32",
        "96 B",
        "352 B",
        "embed: vocab",
    ]
    assert rows["norm.weight"].endswith("frozen")
    assert "12x8 x 2" in rows["blocks.{0-1}.mlp.0.weight"]
    num_bytes = 4 * sum(parameter.numel() for parameter in module.parameters())
    assert f"{num_bytes / 1024:.1f} KiB" in rows["total"]


def test_tied_parameters_count_once():
    module = Tied()
    text = D9DStrategy({"data_parallel_shard": 2}).explain(module)
    rows = {line.split()[0]: line for line in text.split("\n")}
    assert rows["head.weight"].endswith("tied to embed.weight")
    assert " 0 B " in rows["head.weight"]


def test_a_wrong_plan_is_said_beforehand():
    with pytest.raises(ValueError, match="nothing says which layers to split"):
        D9DStrategy({"tensor_parallel": 2}).explain(Classifier())
    with pytest.raises(RuntimeError, match="no LightningModule"):
        D9DStrategy({"tensor_parallel": 2}).explain()


@pytest.mark.world_size(4)
@pytest.mark.parametrize("mesh", MESHES[4], ids=str)
@pytest.mark.parametrize("plan", [PLAN, {**PLAN, "blocks.0": "shard"}], ids=["all", "one block"])
def test_predictions_are_what_is_read(mesh, plan):
    module = seeded(Classifier)
    trainer = train(mesh, module, plan=plan)
    params = trainer.strategy.mesh
    resolved = resolve_plan(Classifier(), ParallelPlan(parallelize=plan, min_unit_params=20, fsdp_kwargs={}), params)
    predicted = predict_layouts(seeded(Classifier), resolved, params)
    read = read_layouts(module, resolved)
    assert {name: layout.placements for name, layout in read.items()} == {
        name: layout.placements for name, layout in predicted.items()
    }
    if dist.get_rank() == 0:
        assert read == predicted
    # Over all ranks, what is neither cut nor copied is there once.
    held = torch.tensor([layout.num_local for layout in read.values()])
    dist.all_reduce(held)
    copies = dict(zip(read, held.tolist(), strict=True))
    is_sharded = "data_parallel_shard" in mesh and "blocks.0" not in plan
    assert copies["head.weight"] == 7 * 8 * (1 if is_sharded else 2)
    assert "steps: native, one batch after the other" in trainer.strategy.explain()


def test_how_steps_run():
    params = D9DStrategy({"pipeline_parallel": 2}, pipeline_module="model").mesh
    place = "pipeline over 2 ranks (1f1b)"
    assert steps_line(params, 4, "1f1b", 1) == f"split, {place}: each batch is cut into 4 microbatches"
    window = "the batches that accumulate_grad_batches puts together run as one pack"
    assert steps_line(params, None, "1f1b") == f"gather, {place}: {window}"
    unknown = f"split (gather, if accumulate_grad_batches > 1), {place}: each batch is cut into 4 microbatches"
    assert steps_line(params, 4, "1f1b") == unknown
    assert steps_line(params, None, "1f1b", 3).startswith(
        f"gather, {place}: 3 batches, those of an accumulation window"
    )
    assert steps_line(params, None, "1f1b", 1).endswith("so stages wait for each other: set microbatches")
    one = D9DStrategy({}).mesh
    assert steps_line(one, 4, "1f1b").startswith("split, each batch is cut into 4 microbatches, forward")
    assert steps_line(one, None, "1f1b").startswith("native")


def test_a_pipeline_is_explained_before_it_is_cut():
    """Four blocks over two ranks, two stages in a loop on each: rank 0 has the blocks 0 and 2, and what is outside."""

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(2, 4, bias=False)
            self.model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])

    strategy = D9DStrategy({"pipeline_parallel": 2}, pipeline_module="model", schedule="interleaved")
    text = strategy.explain(Stack())
    assert "gather, pipeline over 2 ranks (interleaved)" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert [rows[f"model.{index}.weight"].split()[3:5] for index in range(4)] == [["pp", "stage"]] * 4
    assert rows["total"].split() == ["total", "160", "B", "288", "B"]  # (8 + 2 * 16) and (8 + 4 * 16) times 4
