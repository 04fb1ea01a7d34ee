"""The order of hooks within a step, written down for each way that steps run."""

from collections import Counter

import pytest
import torch

from tests.d9d_lightning.differential import WORLD_1, WORLD_2, Case, Probe, run_ours

LETTERS = {
    "on_train_batch_start": "<",
    "on_train_batch_end": ">",
    "training_step": "T",
    "optimizer_step": "(",
    "on_before_zero_grad": "Z",
    "on_before_backward": "b",
    "on_after_backward": "a",
    "on_before_optimizer_step": "O",
    "configure_gradient_clipping": "C",
}
"""Hooks of the module. "(" stands where the step of an optimizer begins."""

# Seven batches in windows of 3, as of the report that hooks were not called while batches accumulate.
WINDOWS = {
    "native": "<TZba> <Tba> <(TbaOC> <TZba> <Tba> <(TbaOC> <(TZbaOC>",
    "split": "<TZbaTba> <TbaTba> <(TbaTbaOC> <TZbaTba> <TbaTba> <(TbaTbaOC> <(TZbaTbaOC>",
    "replicate": "<TZba> <Tba> <(TbaOC> <TZba> <Tba> <(TbaOC> <(TZbaOC>",
    # Captures of six microbatches in front of the first stage; the last stage runs each step again, to its end.
    "pipeline 0": "<> <> <(Z TTTTTT aOC> <> <> <(Z TTTTTT aOC> <(Z TT aOC>",
    "pipeline 1": "<> <> <(Z TTTTTT TbTbTbTbTbTb aOC> <> <> <(Z TTTTTT TbTbTbTbTbTb aOC> <(Z TT TbTb aOC>",
}


def letters(run):
    return "".join(LETTERS.get(name, "") for owner, name, *_ in run.events if owner == "module")


def run_windows(variant, folder, module=Probe):
    case = Case(
        lambda folder: {"accumulate_grad_batches": 3, "gradient_clip_val": 1.0, "limit_val_batches": 0},
        module,
        num_train=7,
    )
    return run_ours(case, variant, folder)


@pytest.mark.world_size(1)
@pytest.mark.parametrize("name", WORLD_1)
def test_one_process(name, tmp_path):
    assert letters(run_windows(WORLD_1[name], tmp_path)) == WINDOWS[name].replace(" ", "")


@pytest.mark.world_size(2)
def test_replicas(tmp_path):
    assert letters(run_windows(WORLD_2["replicate"], tmp_path)) == WINDOWS["replicate"].replace(" ", "")


@pytest.mark.world_size(2)
def test_pipeline(tmp_path):
    run = run_windows(WORLD_2["pipeline"], tmp_path)
    rank = run.trainer.global_rank
    expected = WINDOWS[f"pipeline {rank}"].replace(" ", "")
    # When a microbatch is captured and when its step ends is up to the schedule.
    own = [sorted(step) for step in letters(run).split(">")]
    assert own == [sorted(step) for step in expected.split(">")]
    without_steps = {ord(letter): None for letter in "Tb"}
    assert letters(run).translate(without_steps) == expected.translate(without_steps)


@pytest.mark.world_size(1)
def test_counts_of_hooks(tmp_path):
    """Seven batches, three steps; the optimizer sees gradients that nobody has clipped yet."""
    counts = Counter(letters(run_windows(WORLD_1["native"], tmp_path)))
    assert {letter: counts[letter] for letter in "TbaOC("} == {"T": 7, "b": 7, "a": 7, "O": 3, "C": 3, "(": 3}


class Norms(Probe):
    """Keeps the norm of the gradients of its head, in front of and behind clipping."""

    def __init__(self):
        super().__init__()
        self.norms = []

    def norm(self):
        return torch.stack([p.grad.norm() for p in self.head.parameters()]).norm()

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        before = self.norm()
        for parameter in self.head.parameters():
            parameter.grad.mul_(2)
        self.norms.append((before.item(), self.norm().item()))

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(self.norm().item())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", WORLD_2)
def test_gradients_are_whole_in_front_of_the_optimizer(name, tmp_path):
    norms = run_windows(WORLD_2[name], tmp_path, Norms).module.norms
    assert len(norms) == 6
    for seen, (before, after) in zip(norms[::2], norms[1::2], strict=True):
        assert seen == before == pytest.approx(after / 2)
