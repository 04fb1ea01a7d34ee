"""Runs the command line: `python -m d9d`."""

import sys

from d9d.cli import main

if __name__ == "__main__":
    sys.exit(main())
