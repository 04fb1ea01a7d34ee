"""Detects that PyPI's own `d9d` distribution shares the environment with d9d-lightning."""

from importlib import metadata

_FOREIGN_DISTRIBUTION = "d9d"


def refuse_foreign_d9d() -> None:
    """Raise when the distribution `d9d` is installed beside d9d-lightning.

    Both write files into one `d9d` folder, so whichever was installed last has replaced some files of the other.

    Raises:
        ImportError: The distribution `d9d` is installed.
    """
    try:
        foreign = metadata.distribution(_FOREIGN_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"The distribution 'd9d' {foreign.version} is installed in {foreign.locate_file('')}, beside 'd9d-lightning'. "
        "Both provide the import name `d9d` and overwrite each other's files. Keep one of them. To keep d9d-lightning: "
        "`pip uninstall d9d`, then `pip install --force-reinstall --no-deps d9d-lightning`, because the uninstall also "
        "removes the files that both share."
    )
