"""The plot needs a package that is not a dependency."""

import sys

import pytest
from torch.optim.lr_scheduler import ConstantLR

from d9d.lr_scheduler import visualize_lr_scheduler


def test_without_plotly_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ImportError, match="pip install plotly"):
        visualize_lr_scheduler(ConstantLR, num_steps=2)
