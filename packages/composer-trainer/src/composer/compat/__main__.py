"""``python -m composer.compat``: what to change in a program that was written for MosaicML Composer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from composer.compat.scan import UNREADABLE, scan

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each line to change; return 1 if a line does not work unchanged, 2 if a file cannot be read, else 0."""
    parser = argparse.ArgumentParser(prog="python -m composer.compat", description="Move from MosaicML Composer.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("scan", help="print each line that has to change, with the change; runs nothing")
    command.add_argument("path", help="a Python file, or a folder of Python files")
    code = 0
    try:
        for path, finding in scan(parser.parse_args(arguments).path):
            is_read = finding.former != UNREADABLE
            print(f"{path}:{finding}", file=sys.stdout if is_read else sys.stderr)
            code = max(code, 2 if not is_read else int(not finding.works))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
