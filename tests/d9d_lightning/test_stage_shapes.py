"""What crosses stage boundaries, held against what the layers return when they run."""

import contextlib
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from d9d.core.pytree import tree_leaves, tree_map_only
from d9d.core.types import TensorSpec
from d9d_lightning.pipeline.call import CapturedCall
from d9d_lightning.pipeline.stage_calls import LayerCalls
from d9d_lightning.pipeline.stage_shapes import StageShapes
from d9d_lightning.pipeline.stages import PipelineStages, build_stages, plan_cut


def shapes_of(module, **options):
    """Shapes of a Sequential with each layer as a stage."""
    names = tuple(name for name, _ in module.named_children())
    ranges = tuple((index, index + 1) for index in range(len(names)))
    return StageShapes(module, names, ranges, LayerCalls(module, names), **options)


def call(*args, **kwargs):
    return CapturedCall(args, kwargs)


def real_spec(output):
    return tree_map_only(torch.Tensor, lambda t: TensorSpec(shape=tuple(t.shape), dtype=t.dtype), output)


class First(nn.Module):
    def forward(self, outputs):
        return outputs[0]


class Views(nn.Module):
    def forward(self, x):
        return x.transpose(0, 1)[:, 1:].unsqueeze(-1).expand(-1, -1, -1, 2).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)


MODULES = {
    "linear, dropout, norm": lambda: nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.3), nn.LayerNorm(3), nn.Linear(3, 2)),
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Conv1d(6, 2, 3, stride=2), nn.BatchNorm1d(2), nn.ReLU()),
    "recurrent": lambda: nn.Sequential(
        nn.LSTM(8, 3, 2, batch_first=True, dropout=0.1, bidirectional=True), First(), nn.GRU(6, 4), First()
    ),
    "transformer": lambda: nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 5, batch_first=True),
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 5, batch_first=True), 2, enable_nested_tensor=False),
        nn.Linear(8, 1),
    ),
    "attention": lambda: nn.Sequential(SelfAttention(), First(), nn.Linear(8, 2)),
    "views": lambda: nn.Sequential(Views(), nn.Flatten(), nn.Identity()),
    "parametrized": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)), nn.Linear(4, 2)),
    "weight norm": lambda: nn.Sequential(old_weight_norm(), nn.Linear(4, 2)),
}


def old_weight_norm():
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(8, 4))  # its weight is a tensor of a graph, which copies refuse


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", MODULES)
def test_layers_of_torch(kind, training):
    module = MODULES[kind]().train(training)
    shapes = shapes_of(module)
    shapes.follow(list(module))
    x = torch.randn(4, 6, 8)
    before = torch.get_rng_state(), {name: value.clone() for name, value in module.state_dict().items()}
    specs = [shapes.spec(index, call(x)) for index in range(len(module) - 1)]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(value, before[1][name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not any(isinstance(tensor, FakeTensor) for tensor in module.state_dict().values())
    value = x
    for layer, spec in zip(list(module)[:-1], specs, strict=True):
        value = layer(value)
        assert spec == real_spec(value)


def test_embeddings_and_modules_on_meta():
    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5, dtype=torch.float32), nn.Linear(5, 5))
    assert shapes_of(module).spec(1, call(torch.zeros(2, 3, dtype=torch.long))) == TensorSpec((2, 3, 5), torch.float32)


def test_nothing_of_the_module_is_kept():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 4))
            self.register_buffer("table", torch.zeros(3, 4))
            self.plain = torch.zeros(3, 4)
            self.made = self.weight * 2  # not a leaf

        def forward(self, x):
            return x @ self.weight + self.table[0] + self.plain[0] + self.made[0]

    module = nn.Sequential(Table(), nn.Linear(4, 4))
    shapes = shapes_of(module)
    assert shapes.spec(0, call(torch.zeros(2, 3))).shape == (2, 4)
    copies = [*shapes._on_meta, *shapes._by_device[torch.device("cpu")]]
    tensors = [
        value for copied in copies for value in (*vars(copied).values(), *copied.parameters(), *copied.buffers())
    ]
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    assert len(tensors) == 2 * 4
    assert all(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)
    assert type(module[0].plain) is torch.Tensor


def test_layers_that_can_not_be_copied():
    class Locked(nn.Linear):
        def __init__(self):
            super().__init__(3, 4)
            self.lock = threading.Lock()
            self.inner = nn.Linear(4, 2)

        def forward(self, x):
            with self.lock:
                return self.inner(super().forward(x))

    shared = Locked()
    module = nn.Sequential(nn.Identity(), shared, nn.Linear(2, 3), shared, nn.Identity())
    shapes = shapes_of_all(module, 5)
    assert [shapes.spec(index, call(torch.zeros(5, 3))).shape for index in range(4)] == [(5, 3), (5, 2), (5, 3), (5, 2)]
    assert shared.weight.device.type == "cpu"


def shapes_of_all(module, num_layers):
    names = tuple(map(str, range(num_layers)))
    ranges = tuple((index, index + 1) for index in range(num_layers))
    return StageShapes(module, names, ranges, LayerCalls(module, names))


class Counting(nn.Module):
    """Counts runs of its copies: the class, as copies have attributes of their own."""

    num_runs = 0

    def forward(self, x, note=None):
        type(self).num_runs += 1
        return (x["a"] if isinstance(x, dict) else x), note


class Noted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Counting(), nn.Identity()

    def forward(self, x, note=None):
        return self.second(self.first(x, note))


def test_forms_of_calls_are_known_again():
    module = Noted()
    Counting.num_runs = 0
    shapes = shapes_of(module)
    shapes.follow([module.first, module.second])

    def num_new(*args, **kwargs):
        before = Counting.num_runs
        shapes.spec(0, call(*args, **kwargs))
        return Counting.num_runs - before

    x = torch.zeros(2, 3)
    assert num_new(x) == 1
    assert num_new(torch.ones(2, 3)) == 0
    assert num_new(torch.ones(2, 3, requires_grad=True)) == 0
    assert num_new(torch.ones(2, 4)) == 1
    assert num_new(torch.ones(2, 3).double()) == 1
    assert num_new({"a": x}) == 1
    assert num_new({"a": x, "b": x}) == 1
    assert num_new({"a": torch.ones(2, 3)}) == 0
    assert num_new(x, 1) == 1
    assert num_new(x, True) == 1  # equal to 1, but another value
    assert num_new(x, note=1) == 1
    assert num_new(x, (1, "a")) == 1
    assert num_new(x, (1, "a")) == 0
    assert num_new(x, x) == 1
    assert num_new(x, np.zeros(2)) == 1  # not hashable: each time
    assert num_new(x, np.zeros(2)) == 1
    module.eval()
    assert num_new(x) == 1
    module.train()
    assert num_new(x) == 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert num_new(x) == 1
        assert num_new(x) == 0


def test_constants_of_an_activation():
    spec = shapes_of(Noted()).spec(0, call(torch.zeros(2, 3), (None, 7, "tag")))
    assert spec == (TensorSpec((2, 3), torch.float32), (None, 7, "tag"))
    assert len(tree_leaves(spec)) == 3  # None is no leaf


def test_types_follow_the_context_of_the_stages():
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3))
    contexts = [lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
    shapes = shapes_of(module, run_in=lambda: contexts[-1]())  # noqa: PLW0108  # the list changes
    x = torch.zeros(2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = [module[0](x).dtype, module[1](module[0](x)).dtype]
    assert [shapes.spec(index, call(x)).dtype for index in range(2)] == expected
    # Another Trainer runs the same stages in another precision.
    contexts.append(contextlib.nullcontext)
    assert [shapes.spec(index, call(x)).dtype for index in range(2)] == [torch.float32] * 2


def test_placeholders_tell_the_mode_of_other_stages():
    class Early(nn.Linear):
        def forward(self, x):
            return super().forward(x) if self.training else x

    module = nn.Sequential(Early(3, 5), nn.Linear(5, 5))
    names, ranges = plan_cut(module, PipelineStages(), 2)
    (second,) = build_stages(module, PipelineStages(), names, ranges, [1])
    spec = second._shapes.spec
    assert spec(0, call(torch.zeros(2, 3))).shape == (2, 5)
    module.eval()
    assert spec(0, call(torch.zeros(2, 3))).shape == (2, 3)
    module.train()
    assert spec(0, call(torch.zeros(2, 3))).shape == (2, 5)


def test_random_states_of_python_code_stay():
    class Jitter(nn.Module):
        def forward(self, x):
            return x * random.random() * np.random.rand() + torch.rand(3)

    module = nn.Sequential(Jitter(), nn.Identity())
    shapes = shapes_of(module)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    shapes.spec(0, call(torch.zeros(2, 3)))
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


class Selects(nn.Module):
    def forward(self, x):
        return x[x > 0]


def test_shapes_that_depend_on_values():
    module = nn.Sequential(nn.Identity(), Selects(), nn.Identity())
    with pytest.raises(RuntimeError, match=r"layer '1' \(Selects\).*transfer_spec"):
        shapes_of(module).spec(0, call(torch.zeros(3)))
    by_hand = shapes_of(module, transfer_spec=lambda stage, x: TensorSpec((stage, x.numel()), x.dtype))
    assert by_hand.spec(1, call(torch.zeros(3))) == TensorSpec((1, 3), torch.float32)


def test_a_failing_layer_is_named():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 6), nn.Identity())
    with pytest.raises(RuntimeError, match=r"layer '1' \(Linear\) does not run.*RuntimeError"):
        shapes_of(module).spec(0, call(torch.zeros(2, 3)))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_and_inference(reentrant):
    class Saved(nn.Linear):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=reentrant)

    module = nn.Sequential(nn.Linear(3, 4), Saved(4, 5), nn.Identity())
    shapes = shapes_of(module)
    with torch.inference_mode():
        assert shapes.spec(1, call(torch.zeros(2, 3))).shape == (2, 5)
    with torch.no_grad():
        assert shapes.spec(1, call(torch.zeros(2, 7, 3))).shape == (2, 7, 5)


@pytest.mark.world_size(2)
def test_layers_with_collectives():
    class Gathers(nn.Module):
        def forward(self, x):
            if torch.distributed.get_rank() == 0:  # none is run, or this would wait for the other rank
                torch.distributed.all_reduce(x)
            return x.double()

    module = nn.Sequential(nn.Conv1d(3, 4, 1), nn.SyncBatchNorm(4), Gathers(), nn.Identity())
    assert shapes_of(module).spec(2, call(torch.zeros(2, 3, 5))) == TensorSpec((2, 4, 5), torch.float64)
