"""``python -m composer.compat``: what to change in a program that was written for MosaicML Composer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from composer.compat.scan import UNREADABLE, scan
from composer.core.checks import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each line to change; return 1 if a line does not work unchanged, 2 if a file cannot be read, else 0."""
    parser = argparse.ArgumentParser(prog="python -m composer.compat", description="Move from MosaicML Composer.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("scan", help="print each line that has to change, with the change; runs nothing")
    command.add_argument("path", help="a file of Python or YAML, or a folder of such files")
    command.add_argument("--summary", action="store_true", help="print only the counts, and whether the program runs")
    given = parser.parse_args(arguments)
    counts = [0, 0, 0]
    try:
        for path, finding in scan(given.path):
            kind = 2 if finding.former == UNREADABLE else int(not finding.works)
            counts[kind] += 1
            if not given.summary:
                print(printable(f"{path}:{finding}"), file=sys.stderr if kind == 2 else sys.stdout)
    except FileNotFoundError as error:
        print(printable(str(error)), file=sys.stderr)  # noqa: T201
        return 2
    code = max((kind for kind, count in enumerate(counts) if count), default=0)
    if given.summary:
        print(  # noqa: T201
            f"{counts[0]} work, with a warning or other numbers; {counts[1]} have to change; "
            f"{counts[2]} files cannot be read.\n"
            f"The program {'does not run' if counts[1] else 'runs'} unchanged, as far as names and arguments show."
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
