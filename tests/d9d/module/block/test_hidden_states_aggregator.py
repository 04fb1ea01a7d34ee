"""Means per layer, collected over stages, by hand."""

import torch

from d9d.module.block.hidden_states_aggregator import HiddenStatesAggregationMode, create_hidden_states_aggregator

STATES = torch.arange(12, dtype=torch.float64).view(2, 3, 2)
MASK = torch.tensor([[1, 1, 0], [0, 0, 1]])
MEANS = torch.tensor([[1.0, 2.0], [10.0, 11.0]], dtype=torch.float64)


def test_mean_over_two_stages():
    first = create_hidden_states_aggregator(HiddenStatesAggregationMode.mean, MASK)
    first.add_hidden_states(STATES)
    first.add_hidden_states(STATES * 10)
    snapshot = first.pack_with_snapshot(None)
    second = create_hidden_states_aggregator(HiddenStatesAggregationMode.mean, MASK)
    second.add_hidden_states(-STATES)
    assert torch.equal(second.pack_with_snapshot(snapshot), torch.stack((MEANS, MEANS * 10, -MEANS)))


def test_packing_empties_the_aggregator():
    aggregator = create_hidden_states_aggregator(HiddenStatesAggregationMode.mean, None)
    aggregator.add_hidden_states(STATES)
    assert torch.equal(aggregator.pack_with_snapshot(None), STATES.mean(1)[None])
    assert aggregator.pack_with_snapshot(None) is None
    assert aggregator.pack_with_snapshot(STATES) is STATES


def test_mode_no_keeps_nothing():
    aggregator = create_hidden_states_aggregator(HiddenStatesAggregationMode("no"), MASK)
    aggregator.add_hidden_states(STATES)
    assert aggregator.pack_with_snapshot(None) is None


def test_gradients_reach_the_selected_tokens():
    states = STATES.clone().requires_grad_()
    aggregator = create_hidden_states_aggregator(HiddenStatesAggregationMode.mean, MASK)
    aggregator.add_hidden_states(states)
    aggregator.pack_with_snapshot(None).sum().backward()
    assert states.grad[:, :, 0].tolist() == [[0.5, 0.5, 0], [0, 0, 1]]
