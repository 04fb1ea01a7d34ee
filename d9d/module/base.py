"""What the package expects of a model."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class ModuleLateInit(Protocol):
    """A module that is built without memory and gets its values later."""

    def reset_parameters(self) -> None:
        """Initialise every parameter and buffer in place."""
        ...
