"""Parameter-efficient fine-tuning: train adapters, or chosen modules, of a model that is otherwise frozen."""

from .base import PeftInjectionResult, PeftMethod, inject_peft_and_freeze, merge_peft

__all__ = ["PeftInjectionResult", "PeftMethod", "inject_peft_and_freeze", "merge_peft"]
