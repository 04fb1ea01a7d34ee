"""Losses of five steps of one seed, as transformers has computed them."""

import pytest
import torch
import torch.nn.functional as F

from tests.d9d.module.block.oracles import EverythingInDouble
from tests.d9d.module.model.catalogue import CATALOGUE
from tests.d9d.module.model.test_catalogue import mapped
from tests.numerics.model_runs import NUM_STEPS, batch_of, build_whole, optimizer_of, run_plainly

GOLDEN = {
    "qwen3 dense": [3.5121120583925443, 3.5082078938671173, 3.4950089826004063, 3.518044811221656, 3.5349038968029896],
    "qwen3 moe": [3.5049871882278887, 3.499762631816185, 3.490973721393297, 3.488744571134088, 3.5062752064853258],
}
"""By transformers 5.24 and torch 2.13, from the initial values of seed 11."""
SAME = {"rel": 0, "abs": 1e-10}  # the same sums in another order, through five steps
ALL = pytest.mark.parametrize("name", GOLDEN)


@ALL
def test_models_of_the_catalogue(name: str):
    assert run_plainly(name, torch.float64, router_losses=False).losses == pytest.approx(GOLDEN[name], **SAME)


@ALL
def test_transformers(name: str):
    pytest.importorskip("transformers")
    row = CATALOGUE[name]
    export = row.mapper(row.causal_lm.export, False, in_memory=True)
    losses: list[float] = []
    with EverythingInDouble():
        theirs = row.build_theirs("ForCausalLM", False).double().train()
        theirs.load_state_dict(mapped(export, build_whole(name, torch.float64).state_dict()))
        optimizer = optimizer_of(theirs)
        for step in range(NUM_STEPS):
            ids, labels = batch_of(step)
            loss = F.cross_entropy(theirs(ids).logits.flatten(0, 1), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses == pytest.approx(GOLDEN[name], **SAME)
