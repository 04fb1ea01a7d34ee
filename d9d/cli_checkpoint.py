"""``python -m d9d checkpoint``: training checkpoints, for people."""

import argparse
from collections.abc import Iterator
from pathlib import Path

__all__ = ["HELP", "add_arguments", "describe"]

HELP = """Looks at training checkpoints, those of the native trainer.

  list DIR            the checkpoints of a run, oldest first
  verify DIR          reads all files of a checkpoint, or of all in a folder, and holds them against their digests
  show DIR            the tensors and values of a checkpoint
  diff DIR OTHER      in what two checkpoints differ, whatever meshes they were written on

The exit status is 0; 1 if something is damaged (verify) or different (diff).

  python -m d9d checkpoint list runs/checkpoints/my-run
  python -m d9d checkpoint show runs/checkpoints/my-run/save-80 --names 'state.optimizer.*'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the words after ``python -m d9d checkpoint``."""
    parser.add_argument("action", choices=["list", "verify", "show", "diff"], help="what to do")
    parser.add_argument("folder", type=Path, metavar="DIR", help="a checkpoint (save-<step>), or a folder of some")
    parser.add_argument("other", type=Path, nargs="?", metavar="OTHER", help="the checkpoint to compare with (diff)")
    parser.add_argument("--names", default="*", metavar="PATTERN", help="names to show or compare (default: all)")


def describe(args: argparse.Namespace) -> tuple[str, bool]:
    """Return the text to show, and whether something is damaged or different.

    Raises:
        ValueError: The arguments do not fit one another, or a file is damaged.
        OSError: A file cannot be read.
    """
    if (args.action == "diff") != (args.other is not None):
        raise ValueError(f"{args.action} takes {'two checkpoints' if args.action == 'diff' else 'one folder'}.")
    match args.action:
        case "list":
            return _list(args.folder), False
        case "verify":
            return _verify(args.folder)
        case "show":
            return _show(args.folder, args.names), False
        case _:
            return _diff(args.folder, args.other, args.names)


def _list(folder: Path) -> str:
    from d9d.checkpoint.inspection import list_checkpoints

    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}.")
    return "\n".join(list_checkpoints(folder)) or f"{folder} holds no checkpoint."


def _verify(folder: Path) -> tuple[str, bool]:
    from d9d.checkpoint.inspection import verify_folder

    found = list(verify_folder(folder))
    if not found:
        raise FileNotFoundError(f"{folder} holds no complete checkpoint.")
    lines = [line for path, problems in found for line in _verdict(path, problems)]
    return "\n".join(lines), any(problems for _, problems in found)


def _verdict(path: Path, problems: list[str]) -> Iterator[str]:
    yield f"{path}: {'damaged' if problems else 'intact'}"
    yield from (f"  {problem}" for problem in problems)


def _show(folder: Path, pattern: str) -> str:
    from d9d.checkpoint.inspection import describe_checkpoint

    _require_checkpoint(folder)
    return "\n".join(describe_checkpoint(folder, pattern)) or f"{folder} holds nothing of a name like {pattern}."


def _diff(first: Path, second: Path, pattern: str) -> tuple[str, bool]:
    from d9d.checkpoint.inspection import differences

    _require_checkpoint(first)
    _require_checkpoint(second)
    lines = [f"{found.name}: {found.text}" for found in differences(first, second, pattern)]
    return "\n".join(lines) or "no difference", bool(lines)


def _require_checkpoint(folder: Path) -> None:
    from d9d.checkpoint.inspection import is_checkpoint

    if is_checkpoint(folder):
        return
    near = [path for base in (folder, folder.parent) for path in sorted(base.glob("save-*")) if is_checkpoint(path)]
    there = (
        f"There are {', '.join(map(str, near[-3:]))}." if near else "Name one, such as runs/checkpoints/job/save-100."
    )
    raise FileNotFoundError(f"{folder} is no complete checkpoint. {there}")
