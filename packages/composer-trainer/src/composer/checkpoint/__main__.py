"""``python -m composer.checkpoint``: inspect checkpoints from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.finding import locate
from composer.checkpoint.inspection import diff_checkpoints, merge_weights, show_checkpoint, verify_checkpoint

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0; 1 if checkpoints differ or are damaged; 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m composer.checkpoint", description="Inspect checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, text in (
        ("show", "print the clock, algorithms, metrics, sizes and largest modules"),
        ("verify", "compare every file with its checksum"),
    ):
        commands.add_parser(command, help=text).add_argument("path", help="a folder, URL or link")
    compare = commands.add_parser("diff", help="print how two differ")
    compare.add_argument("first", help="a folder, URL or link")
    compare.add_argument("second", help="another")
    merge = commands.add_parser("merge", help="write the weights, which may be in parts, to one safetensors file")
    merge.add_argument("path", help="a folder, URL or link")
    merge.add_argument("file", help="the file to write")
    chosen = parser.parse_args(arguments)
    try:
        lines, code = _run(chosen)
    except (CheckpointError, ImportError, OSError) as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    print("\n".join(lines))  # noqa: T201
    return code


def _run(chosen: argparse.Namespace) -> tuple[list[str], int]:
    if chosen.command == "show":
        return [show_checkpoint(chosen.path)], 0
    if chosen.command == "verify":
        folder, name = locate(chosen.path)  # of a folder of checkpoints, the one that is verified
        manifest = verify_checkpoint(folder.at(name))
        return [f"{folder.at(name)} is complete: {len(manifest.files)} files, {manifest.size:,} bytes."], 0
    if chosen.command == "merge":
        merge_weights(chosen.path, chosen.file)
        return [f"{chosen.file} has the weights of {chosen.path}."], 0
    lines = diff_checkpoints(chosen.first, chosen.second)
    return lines or ["There is no difference."], 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
