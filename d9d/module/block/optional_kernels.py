"""Kernels of other packages that configs can name."""

import importlib.util


def missing_kernel_error(what: str, module: str, package: str, instead: str) -> ImportError | NotImplementedError:
    """Return the error that says why a kernel of another package can not be used.

    Args:
        what: The choice in words, with its kind.
        module: What would be imported.
        package: What would be installed.
        instead: The kind that runs anywhere.

    Returns:
        An ImportError if the package is not installed, and a NotImplementedError if it is, since we do not call it yet.
    """
    root = module.split(".", maxsplit=1)[0]
    # A missing parent package makes `find_spec` raise.
    if importlib.util.find_spec(root) is None or importlib.util.find_spec(module) is None:
        return ImportError(
            f"{what} needs the package {package}, which is not installed. "
            f'Run "pip install {package}", or use the kind {instead}.',
            name=module,
        )
    return NotImplementedError(f"{what} is declared, but not called yet. Use the kind {instead}.")
