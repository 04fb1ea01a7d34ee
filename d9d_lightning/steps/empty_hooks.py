"""What Lightning calls around a training step and its backward pass, which is mostly empty.

[Note: empty hooks]
Around each training step Lightning enters two contexts of the precision plugin. In front of each backward pass and behind it,
it calls a hook of the module and of every callback, each within a context for the profiler and one for `self.log`. That takes
as long as the passes of a small layer. What it calls does nothing, unless somebody has replaced a function of Lightning's base
classes, on a class or on an object: then they are called as ever.
"""

from types import MethodType

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy

__all__ = ["calls_module_only", "calls_torch_only", "has_empty_hooks"]

# As they are when this module is imported: whatever replaces them later is not empty.
_BEFORE_MODULE, _AFTER_MODULE = LightningModule.on_before_backward, LightningModule.on_after_backward
_BEFORE_CALLBACK, _AFTER_CALLBACK = Callback.on_before_backward, Callback.on_after_backward
_STEP_CONTEXT, _FORWARD_CONTEXT = Precision.train_step_context, Precision.forward_context
_BACKWARD_MODULE, _BACKWARD_PLUGIN = LightningModule.backward, Precision.backward
_BEFORE_PLUGIN, _AFTER_PLUGIN = (Precision.pre_backward, MixedPrecision.pre_backward), Precision.post_backward


def calls_module_only(strategy: Strategy) -> bool:
    """Return whether Lightning's training step of a strategy does nothing but call that of the module.

    No communication. See [Note: empty hooks].

    Args:
        strategy: Its precision plugin has an empty context in full precision; its model is the module, unless it was wrapped.
    """
    plugin = strategy.precision_plugin
    step, forward = plugin.train_step_context, plugin.forward_context
    is_empty = _function(step) is _STEP_CONTEXT and _function(forward) is _FORWARD_CONTEXT
    return is_empty and strategy.model is strategy.lightning_module


def has_empty_hooks(module: LightningModule, plugin: Precision) -> bool:
    """Return whether what a precision plugin does in front of a backward pass and behind it can be left out.

    No communication. See [Note: empty hooks].

    Args:
        module: The module that is trained.
        plugin: Lightning's or the user's; it does nothing but call hooks, unless it scales the loss.
    """
    options = vars(module.trainer)  # Lightning does not declare them
    return (
        type(options["profiler"]) is PassThroughProfiler
        and _function(plugin.pre_backward) in _BEFORE_PLUGIN
        and _function(plugin.post_backward) is _AFTER_PLUGIN
        and not (isinstance(plugin, MixedPrecision) and plugin.scaler is not None)
        and _function(module.on_before_backward) is _BEFORE_MODULE
        and _function(module.on_after_backward) is _AFTER_MODULE
        and all(_has_empty_hooks(callback) for callback in options["callbacks"])
    )


def calls_torch_only(strategy: Strategy, own_backward: object) -> bool:
    """Return whether nobody sees the loss of a backward pass but torch, which may start with any gradient.

    No communication.

    Args:
        strategy: With its precision plugin and its module, which is trained.
        own_backward: Its method, unless somebody has replaced that.
    """
    module, plugin = strategy.lightning_module, strategy.precision_plugin
    return (
        module is not None
        and _function(strategy.backward) is own_backward
        and _function(module.backward) is _BACKWARD_MODULE
        and _function(plugin.backward) is _BACKWARD_PLUGIN
        and has_empty_hooks(module, plugin)
    )


def _has_empty_hooks(callback: Callback) -> bool:
    before, after = callback.on_before_backward, callback.on_after_backward
    return _function(before) is _BEFORE_CALLBACK and _function(after) is _AFTER_CALLBACK


def _function(hook: object) -> object:
    # What somebody has put on an object may be no method.
    return hook.__func__ if isinstance(hook, MethodType) else None
