"""Objects that users bring fit the protocols without inheriting from them."""

import torch
from torch.utils.data import DataLoader

from d9d.core.protocol import DataLoaderProtocol, LRSchedulerProtocol, MicrobatchPackStream, OptimizerProtocol


def test_torch_optimizers_and_schedulers_fit():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    assert isinstance(optimizer, OptimizerProtocol)
    assert isinstance(torch.optim.lr_scheduler.ConstantLR(optimizer), LRSchedulerProtocol)


def test_a_loader_without_state_does_not_fit():
    assert not isinstance(DataLoader([1, 2]), DataLoaderProtocol)


def test_a_stream_needs_total_steps():
    class Loader:
        def __iter__(self):
            return iter(())

        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict):
            pass

    class Stream(Loader):
        total_steps = None

    assert isinstance(Loader(), DataLoaderProtocol)
    assert not isinstance(Loader(), MicrobatchPackStream)
    assert isinstance(Stream(), MicrobatchPackStream)
