"""``python -m composer.checkpoint``: inspect checkpoints from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.finding import locate
from composer.checkpoint.inspection import diff_checkpoints, merge_weights, show_checkpoint, verify_checkpoint


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0; 1 if checkpoints differ or are damaged; 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m composer.checkpoint", description="Inspect checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command, text, *names in (
        ("show", "print the clock, algorithms, metrics, sizes and largest modules", "path"),
        ("verify", "compare every file with its checksum", "path"),
        ("diff", "print how two differ", "path", "other"),
        ("merge", "write the weights, which may be in parts, to one safetensors file", "path", "file"),
    ):
        added = commands.add_parser(command, help=text)
        for name in names:
            added.add_argument(name, help="the file to write" if name == "file" else "a folder, URL or link")
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
    lines = diff_checkpoints(chosen.path, chosen.other)
    return lines or ["There is no difference."], 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
