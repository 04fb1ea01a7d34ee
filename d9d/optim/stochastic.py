"""AdamW for bfloat16 parameters without fp32 copies of them."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from d9d.kernel.stochastic import adamw_stochastic_bf16_

__all__ = ["StochasticAdamW"]

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_GENERATOR: Final = "generator"


class StochasticAdamW(Optimizer):
    """AdamW that writes bfloat16 parameters with stochastic rounding, see [Note: Stochastic rounding].

    By default the random numbers follow from the step and the position of a parameter in the optimizer: all replicas of a
    parameter draw the same, and a resumed run goes on as it would have. A generator of your own must be in the same state on all
    ranks; its state is in the state dict.

    Args:
        params: bfloat16 parameters, or groups of them.
        lr: Learning rate.
        betas: Decay rates of the averages of gradients and of their squares.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay, times the learning rate.
        generator: Random numbers.
        state_dtype: Dtype of the averages: fp32, or bfloat16, which are rounded stochastically too.

    Raises:
        ValueError: If a parameter is not bfloat16, the averages are neither fp32 nor bfloat16, or a number is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        generator: torch.Generator | None = None,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"lr ({lr}), eps ({eps}) and weight_decay ({weight_decay}) must not be negative, and betas {betas} be from 0 to "
                f"below 1."
            )
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype ({state_dtype}) must be torch.float32 or torch.bfloat16.")
        self._generator = generator
        self._state_dtype = state_dtype
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    # Any: torch's own definition of a group.
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyperparameters of their own.

        Raises:
            ValueError: If one is not bfloat16.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype != torch.bfloat16:
                raise ValueError(
                    f"StochasticAdamW got a parameter of shape {tuple(parameter.shape)} in {parameter.dtype}. It is for bfloat16; "
                    f"convert the model with .to(torch.bfloat16), or use AdamW."
                )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # takes none, gives none
        """Update all parameters that have gradients.

        Raises:
            ValueError: If a closure is given.
            RuntimeError: If a parameter is distributed, and the optimizer was not given to `localize_optimizer`.
        """
        if closure is not None:
            raise ValueError("StochasticAdamW takes no closure: compute the gradients before step().")
        parameters = list(self._parameters())
        for position, (group, parameter) in enumerate(parameters):
            if parameter.grad is None:
                continue
            if isinstance(parameter, DTensor):
                raise RuntimeError(
                    "StochasticAdamW updates local tensors. Call d9d.optim.localize_optimizer(optimizer) before the first step; "
                    "the trainers do that by themselves."
                )
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state |= {name: torch.zeros_like(parameter, dtype=self._state_dtype) for name in _MOMENTS}
            state["step"] += 1
            beta1, beta2 = group["betas"]
            step = int(state["step"].item())
            adamw_stochastic_bf16_(
                parameter,
                parameter.grad,
                state["exp_avg"],
                state["exp_avg_sq"],
                group["lr"],
                beta1,
                beta2,
                group["eps"],
                group["weight_decay"],
                step,
                # Torch's generator of the CPU looks at 32 bits of a seed only.
                self._random_numbers((step * len(parameters) + position) % 2**32, parameter.device),
            )

    def _random_numbers(self, seed: int, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(seed) if self._generator is None else self._generator

    def _parameters(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter

    def state_dict(self) -> StateDict:
        """Return averages and hyperparameters, and the state of the generator if one was given."""
        state_dict = super().state_dict()
        if self._generator is not None:
            state_dict[_GENERATOR] = self._generator.get_state()
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore what `state_dict` has returned.

        Raises:
            ValueError: If the state has a generator and this optimizer has none, or the other way around.
        """
        if (_GENERATOR in state_dict) != (self._generator is not None):
            raise ValueError(
                "the saved state and this optimizer do not both have a generator. Build it with `generator` if the saved one "
                "was built so, else without."
            )
        loaded: StateDict = {}
        # Behind all other hooks, which may change what is loaded.
        hook = self.register_load_state_dict_pre_hook(lambda _, changed: loaded.update(changed))
        try:
            super().load_state_dict({name: value for name, value in state_dict.items() if name != _GENERATOR})
        finally:
            hook.remove()
        # Torch has converted the averages to the dtype of the parameters.
        indices = [index for group in loaded["param_groups"] for index in group["params"]]
        for index, (_, parameter) in zip(indices, self._parameters(), strict=True):
            for name in _MOMENTS:
                if name in loaded["state"].get(index, {}):
                    moment = loaded["state"][index][name]
                    self.state[parameter][name] = moment.to(parameter.device, self._state_dtype, copy=True)
        if self._generator is not None:
            self._generator.set_state(state_dict[_GENERATOR].cpu())
