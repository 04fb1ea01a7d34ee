"""Kernels of other packages, which may not be installed."""

import importlib
from types import ModuleType


def import_kernel(what: str, module: str, package: str, instead: str | None = None) -> ModuleType:
    """Import a module of another package that has kernels.

    Args:
        what: The choice in words, with its kind.
        module: What is imported.
        package: What would be installed.
        instead: The kind that runs anywhere, if there is one.

    Raises:
        ImportError: If it can not be imported, with what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{what} needs the package {package}, of which {module} can not be imported ({error}). "
            f'Run "pip install {package}"' + (f", or use the kind {instead}." if instead else "."),
            name=module,
        ) from error
