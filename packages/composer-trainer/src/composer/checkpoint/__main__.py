"""``python -m composer.checkpoint``: inspect checkpoints from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.finding import locate
from composer.checkpoint.inspection import merge_weights, show_checkpoint, verify_checkpoint
from composer.core.checks import printable


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0; 1 if the checkpoint cannot be used; 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m composer.checkpoint", description="Inspect checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, text, *names in (
        ("show", "print the clock, algorithms, metrics and sizes", "path"),
        ("verify", "compare every file with its checksum", "path"),
        ("merge", "write the weights, which may be in parts, to one safetensors file", "path", "file"),
    ):
        added = commands.add_parser(command, help=text)
        for name in names:
            added.add_argument(name, help="the file to write" if name == "file" else "a folder, URL or link")
    chosen = parser.parse_args(arguments)
    try:
        text = _run(chosen)
    except (CheckpointError, ImportError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    print(printable(text))  # noqa: T201
    return 0


def _run(chosen: argparse.Namespace) -> str:
    if chosen.command == "show":
        return show_checkpoint(chosen.path)
    if chosen.command == "verify":
        folder, name = locate(chosen.path)  # of a folder of checkpoints, the one that is verified
        manifest = verify_checkpoint(folder.at(name))
        return f"{folder.at(name)} is complete: {len(manifest.files)} files, {manifest.size:,} bytes."
    merge_weights(chosen.path, chosen.file)
    return f"{chosen.file} has the weights of {chosen.path}."


if __name__ == "__main__":
    sys.exit(main())
