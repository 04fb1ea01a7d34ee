"""Kernels of other packages on the CPU: what Triton's interpreter (``TRITON_INTERPRET=1``, Triton 3.8) leaves to be done.

The interpreter runs the Python code of a kernel, program by program, on tensors of the CPU. It shows what a kernel computes, and
not that it compiles or is fast.
"""

import builtins
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType

import torch

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl  # kernels find it among the globals of their module

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def use_first_configs() -> None:
    """Leave out tuning, which measures times on a device. To be called before a package with kernels is imported."""
    autotuner = triton.runtime.autotuner.Autotuner
    plain_init = autotuner.__init__

    def init_with_one_config(self, fn, arg_names, configs, *args, **kwargs):
        plain_init(self, fn, arg_names, configs[:1], *args, **kwargs)

    autotuner.__init__ = init_with_one_config


class _LoopIndex(int):
    def to(self, dtype: object) -> "_LoopIndex":
        """Return itself: numbers of Python do not overflow."""
        return self


def _loop_range(*bounds: object) -> Iterator[_LoopIndex]:
    return map(_LoopIndex, builtins.range(*map(int, bounds)))


def count_loops_in_tensors(package: str) -> None:
    """Give the modules of a package, which are imported, loops whose indices have `to`, as those of compiled kernels have."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}."):
            vars(module)["range"] = _loop_range


def take_cpu_tensors(*operators: torch.library.CustomOpDef) -> None:
    """Let operators that were made for CUDA devices run on the CPU too."""
    for operator in operators:
        operator.register_kernel("cpu", operator._init_fn)


def give_log1p(of_cut_cross_entropy: ModuleType) -> None:
    """Replace the function of a library for devices, which has no code to interpret."""

    def log1p(x):
        return tl.log(1 + x)

    vars(of_cut_cross_entropy)["tl_log1p"] = triton.jit(log1p)
