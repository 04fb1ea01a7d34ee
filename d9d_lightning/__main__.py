"""``python -m d9d_lightning``: what can be done with checkpoints of D9DStrategy without a job."""

import argparse
import sys
from collections.abc import Sequence

from d9d_lightning.checkpoints.whole import consolidate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m d9d_lightning", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser(
        "consolidate", help="write a checkpoint folder to one file that plain Lightning loads"
    )
    command.add_argument("folder", help="folder of the checkpoint, such as checkpoints/last.ckpt")
    command.add_argument("file", help="file to write, such as whole.ckpt")
    chosen = parser.parse_args(arguments)
    try:
        consolidate(chosen.folder, chosen.file)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
