"""The contract of task heads."""

import abc
from typing import Generic, TypeVar

import torch
from torch import nn

from d9d.module.base import ModuleLateInit

THeadShared = TypeVar("THeadShared")
THeadOutput = TypeVar("THeadOutput")


class TaskHead(nn.Module, ModuleLateInit, abc.ABC, Generic[THeadShared, THeadOutput]):
    """Turns the hidden states of the last stage into the outputs of a task."""

    @abc.abstractmethod
    def forward(self, hidden_states: torch.Tensor, shared: THeadShared) -> THeadOutput:
        """Compute the outputs.

        Shapes:
            Hidden states are ``(batch, tokens, hidden_size)``.

        Args:
            hidden_states: What the last stage's layers give.
            shared: What else the head needs, such as labels.
        """

    @abc.abstractmethod
    def reset_parameters(self) -> None:
        """Initialise every parameter in place."""
