"""Standing in for the pipelined submodule: capture, injection, and what is refused."""

import collections
import dataclasses

import pytest
import torch
from torch import nn

from d9d_lightning.pipeline.call import CapturedCall, PipelineCall, own_containers, unchanged_batch


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 2)


def build():
    model = Model()
    return model, PipelineCall("net", model.net)


def test_capture_keeps_the_arguments_and_runs_nothing_behind_the_call():
    model, call = build()
    after = []

    def step():
        try:
            model.net(torch.ones(3, 2), "mask", scale=2)
        except Exception:  # noqa: BLE001  # the user's own, which must not see how the step ends
            after.append("caught")
        after.append("went on")

    captured = call.capture("training_step", step, needs_grad=True)
    assert after == []
    assert (captured.args[1:], captured.kwargs) == (("mask",), {"scale": 2})
    captured.forget_values()
    assert captured.args[0].shape == (3, 2)
    assert captured.args[0].untyped_storage().nbytes() == captured.args[0].element_size()


def test_injection_answers_the_call_and_runs_the_rest():
    model, call = build()
    result = call.inject("training_step", lambda: model.net("anything") + 1, 41)
    assert result == 42


def test_hooks_of_the_submodule_run():
    model, call = build()
    seen = []
    model.net.register_forward_pre_hook(lambda module, args: seen.append(args))
    model.net.register_forward_hook(lambda module, args, output: output * 2)
    assert call.inject("training_step", lambda: model.net(1), 21) == 42
    assert seen == [(1,)]


def test_released_it_computes_again():
    model, call = build()
    call.release()
    assert model.net(torch.ones(1, 2)).shape == (1, 2)


def twice(model):
    return model.net(1), model.net(2)


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (
            lambda model, call: call.capture("test_step", lambda: None, needs_grad=False),
            "test_step does not call self.net",
        ),
        (
            lambda model, call: call.capture("training_step", torch.no_grad()(lambda: model.net(1)), needs_grad=True),
            "training_step calls self.net under no_grad",
        ),
        (lambda model, call: call.inject("training_step", lambda: twice(model), 0), "calls self.net a second time"),
        (lambda model, call: call.inject("training_step", lambda: None, 0), "but not on the last one"),
        (lambda model, call: model.net(1), "can be called within training_step"),
    ],
)
def test_violations_are_named(run, text):
    with pytest.raises(RuntimeError, match=text):
        run(*build())


def test_evaluation_may_call_without_gradients():
    model, call = build()
    with torch.no_grad():
        assert call.capture("test_step", lambda: model.net(1), needs_grad=False).args == (1,)


def test_an_error_in_front_of_the_call_is_the_users():
    _, call = build()
    with pytest.raises(LookupError, match="mine"):
        call.capture("training_step", lambda: {}["mine"], needs_grad=True)


class Encoding(collections.UserDict):
    pass


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    extra: dict


def test_a_step_has_containers_of_its_own():
    x = torch.zeros(2)
    batch = {"second": [x], "first": Encoding(x=x), "data": Batch(x, {"y": x})}
    with unchanged_batch("training_step", batch) as own:
        assert list(own) == list(batch)
        own["second"].append(1)
        own["first"].pop("x")
        own["data"].extra.clear()
        own["data"].x = own["data"].x + 1
        del own["data"]
    assert batch["second"] == [x]
    assert batch["first"]["x"] is x
    assert batch["data"].extra["y"] is x
    assert batch["data"].x is x
    assert own_containers(x) is x


def test_tensors_of_a_batch_must_stay():
    with (
        pytest.raises(RuntimeError, match=r"changes a tensor of its batch in place \(shape \(2,\), torch.float32\)"),
        unchanged_batch("training_step", (torch.zeros(3), torch.zeros(2))) as batch,
    ):
        batch[1].add_(1)


def test_a_call_without_positional_arguments_keeps_all():
    call = CapturedCall((), {"x": torch.ones(2)})
    call.forget_values()
    assert call.kwargs["x"].sum() == 2
