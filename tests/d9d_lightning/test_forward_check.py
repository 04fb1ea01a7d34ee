"""Modules whose own forward pass is not what their stages compute are refused, and others are not."""

import gc
import threading
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from d9d_lightning.pipeline.call import CapturedCall
from d9d_lightning.pipeline.stages import PipelineStages, build_stages, plan_cut

LAYERS = ("tok", "blocks.*", "head")
WIDTH = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x, mask=None):
        y = self.norm(x)
        return x + self.attention(y, y, y, key_padding_mask=mask, need_weights=False)[0]


class Net(nn.Module):
    """A transformer that is its layers, one after another; wrong ones change one method."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens, mask=None):
        return self.head(self.body(self.tok(tokens), mask))

    def body(self, x, mask):
        for block in self.blocks:
            x = block(x, mask=mask)
        return x


TOKENS = torch.randint(7, (2, 5))
MASK = torch.zeros(2, 5, dtype=torch.bool)


def first_call(module, *args, layers=LAYERS, stage=0, **kwargs):
    """Cut a module for the rank of a stage, and ask for what crosses the boundary; warnings are errors."""
    options = {name: kwargs.pop(name) for name in ("checks_forward", "with_arguments") if name in kwargs}
    spec = PipelineStages(layers=layers, balance="layers", **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names, ranges = plan_cut(module, spec, 2)
        (built,) = build_stages(module, spec, names, ranges, [stage])
        built._shapes.spec(0, CapturedCall(args, kwargs))
    return built


def variant(**methods):
    return type("Net", (Net,), methods)()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("training", [True, False])
def test_layers_one_after_another(stage, training):
    module = Net()
    whole = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    first_call(module.train(training), TOKENS, MASK, stage=stage)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, whole[name]) for name, value in module.state_dict().items())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())


@pytest.mark.parametrize("arguments", [((TOKENS,), {}), ((), {"tokens": TOKENS, "mask": MASK}), ((TOKENS, None), {})])
def test_forms_of_calls(arguments):
    first_call(Net(), *arguments[0], **arguments[1])


def by_position(self, x, mask):
    for block in self.blocks:
        x = block(x, mask) if mask is not None else block(x)
    return x


def checkpointed(reentrant):
    def body(self, x, mask):
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=reentrant)
        return x

    return body


@pytest.mark.parametrize("body", [by_position, checkpointed(True), checkpointed(False)])
@pytest.mark.parametrize("mask", [MASK, None])
def test_other_ways_to_call_layers(body, mask):
    first_call(variant(body=body), TOKENS, mask)


def scaled(self, x, mask):
    return Net.body(self, x * 4, mask)


def scaled_in_place(self, x, mask):
    return Net.body(self, x.mul_(4), mask)


def own_mask(self, x, mask):
    return Net.body(self, x, torch.ones(x.shape[:2], dtype=torch.bool))


def mask_in_place(self, x, mask):
    return Net.body(self, x, mask.logical_not_())


def without_mask(self, x, mask):
    return Net.body(self, x, None)


def other_order(self, x, mask):
    return self.blocks[0](self.blocks[1](x, mask), mask)


def residual(self, x, mask):
    return x + Net.body(self, x, mask)


def twice(self, x, mask):
    return Net.body(self, self.blocks[0](x, mask), mask)


def left_out(self, x, mask):
    return self.blocks[0](x, mask)


def last_left_out(self, tokens, mask=None):
    return self.body(self.tok(tokens), mask)


def first_scaled(self, tokens, mask=None):
    return Net.forward(self, (tokens + 1) % 7, mask)


def wrapped(self, tokens, mask=None):
    return {"logits": Net.forward(self, tokens, mask)}


def scaled_result(self, tokens, mask=None):
    return Net.forward(self, tokens, mask).mul_(2)


def embeds_again(self, tokens, mask=None):
    output = Net.forward(self, tokens, mask)
    self.tok(tokens)
    return output


def fails_later(self, x, mask):
    return Net.body(self, x * 4, mask) * x.sum().item()


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"body": scaled}, "hands layer 'blocks.0' something else than what 'tok' returns"),
        ({"body": scaled_in_place}, "changes what 'tok' returns in place before layer 'blocks.0'"),
        ({"body": own_mask}, "calls layer 'blocks.0' with another 'mask' than stages do"),
        ({"body": mask_in_place}, "changes 'mask' in place before layer 'blocks.0'"),
        ({"body": without_mask}, "calls layer 'blocks.0' with another 'mask' than stages do"),
        ({"body": other_order}, "calls layer 'blocks.1' where 'blocks.0' comes next"),
        ({"body": residual}, "hands layer 'head' something else than what 'blocks.1' returns"),
        ({"body": twice}, "calls layer 'blocks.0' where 'blocks.1' comes next"),
        ({"body": left_out}, "calls layer 'head' where 'blocks.1' comes next"),
        ({"forward": last_left_out}, "does not call layer 'head'"),
        ({"forward": first_scaled}, "hands layer 'tok' something else than the first argument of the call"),
        ({"forward": wrapped}, "returns something else than its last layer 'head'"),
        ({"forward": scaled_result}, "changes in place what its last layer 'head' returns"),
        ({"forward": embeds_again}, "calls layer 'tok' after the last one"),
        ({"body": fails_later}, "hands layer 'blocks.0' something else than what 'tok' returns"),
    ],
)
def test_other_functions_are_refused_on_all_ranks(methods, message):
    for stage in (0, 1):
        with pytest.raises(ValueError, match=rf"forward\(\) of Net {message}.*checks_forward=False"):
            first_call(variant(**methods), TOKENS, MASK.clone(), stage=stage)
    first_call(variant(**methods), TOKENS, MASK, checks_forward=False)


def test_an_argument_that_forward_alone_uses():
    class Scaled(Net):
        def forward(self, tokens, mask=None, temperature=1.0):
            return super().forward(tokens, mask) / temperature

    with pytest.raises(TypeError, match=r"'temperature'\) reaches no layer"):
        first_call(Scaled(), TOKENS, MASK, temperature=2.0)
    with pytest.raises(ValueError, match="returns something else than its last layer 'head'"):
        first_call(Scaled(), TOKENS, MASK)


def test_both_modes_are_checked_and_a_difference_stays_one():
    def body(self, x, mask):
        return Net.body(self, x + 1 if self.training else x, mask)

    module = variant(body=body).eval()
    built = first_call(module, TOKENS, MASK)
    module.train()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"hands layer 'blocks\.0'"):
            built._shapes.spec(0, CapturedCall((TOKENS, MASK), {}))


def test_a_layer_that_is_listed_twice():
    class Shared(nn.Module):
        num_activations = 2

        def __init__(self):
            super().__init__()
            self.a, self.act, self.b = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)

        def forward(self, x):
            x = self.b(self.act(self.a(x)))
            return self.act(x) if self.num_activations == 2 else x

    first_call(Shared(), torch.zeros(2, 3), layers=["a", "act", "b", "act"])
    module = Shared()
    module.num_activations = 1
    with pytest.raises(ValueError, match="does not call layer 'act' 2 times"):
        first_call(module, torch.zeros(2, 3), layers=["a", "act", "b", "act"])


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(3, 3)

    def forward(self, state):
        return {"x": self.proj(state["x"]), "n": state["n"] + 1}


@pytest.mark.parametrize("changes", [True, False])
def test_structures(changes):
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Pairs(), Pairs()

        def forward(self, state):
            state = self.first(state)
            if changes:
                state["x"] = state["x"] + 1
            return self.second(dict(state))

    state = {"x": torch.zeros(2, 3), "n": 1}
    if not changes:
        first_call(Chain(), state, layers=["first", "second"])
        return
    with pytest.raises(ValueError, match="hands layer 'second' something else"):
        first_call(Chain(), state, layers=["first", "second"])


def test_a_sequential_in_another_order():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    first_call(module, torch.zeros(2, 3), layers=["0", "1"])
    with pytest.raises(ValueError, match="calls layer '0' where '1' comes next"):
        first_call(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.zeros(2, 3), layers=["1", "0"])


def test_layers_of_other_ranks_are_freed():
    module = Net()
    foreign = [weakref.ref(module.head), weakref.ref(module.head.weight)]
    gc.disable()  # memory of a device must not wait for it
    try:
        built = first_call(module, TOKENS, MASK, layers=LAYERS)
        assert built is not None
        assert [reference() for reference in foreign] == [None, None]
    finally:
        gc.enable()


def test_modules_that_can_not_be_checked():
    def reads_values(self, x, mask):
        assert x.sum().item() != 0.5
        return Net.body(self, x, mask)

    with pytest.warns(UserWarning, match="could not be held against its layers, as it does not run.*in training"):
        cut_with_warnings(variant(body=reads_values))
    locked = variant()
    locked.lock = threading.Lock()
    with pytest.warns(UserWarning, match="could not be held against its layers, as the module can not be copied"):
        cut_with_warnings(locked)
    inside = variant()
    inside.head.lock = threading.Lock()  # the layer alone is copied otherwise
    first_call(inside, TOKENS, MASK)


def cut_with_warnings(module):
    spec = PipelineStages(layers=LAYERS, balance="layers")
    names, ranges = plan_cut(module, spec, 2)
    (built,) = build_stages(module, spec, names, ranges, [1])
    for _ in range(2):
        assert built._shapes.spec(0, CapturedCall((TOKENS, MASK), {})).shape == (2, 5, WIDTH)
