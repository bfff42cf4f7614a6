"""``composer -n 2 train.py``: start a training in several processes with torchrun, by the options of Composer."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the equivalent torchrun command and run it; exit with its status. ``train`` is another command."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["train"]:
        from composer.cli.train import main as train  # noqa: PLC0415  (imports torch)

        train(given[1:])
        return
    command = torchrun_arguments(given)
    print(shlex.join(["torchrun", *command]), file=sys.stderr, flush=True)  # noqa: T201
    # Restarted processes of several hosts may read the addresses of those that have ended from a store that is kept.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # --help must not import torch.
    from torch.distributed.elastic.multiprocessing import SignalException  # noqa: PLC0415
    from torch.distributed.run import main as torchrun  # noqa: PLC0415

    try:
        torchrun(command)
    except SignalException as error:  # Ctrl-C or SIGTERM, which the processes have received and reported
        sys.exit(128 + error.sigval)


def torchrun_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of torchrun that are equivalent to those of Composer's launcher.

    Raises:
        SystemExit: An argument is missing or wrong; the reason is printed.

    Example:
        >>> torchrun_arguments(["-n", "2", "train.py", "--lr", "0.1"])
        ['--standalone', '--nproc-per-node=2', 'train.py', '--lr', '0.1']
        >>> torchrun_arguments(["-n", "8", "--world_size", "16", "--node_rank", "1", "--master_addr", "a", "train.py"])
        ['--nnodes=2', '--node-rank=1', '--master-addr=a', '--nproc-per-node=8', 'train.py']
    """
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.module_mode and chosen.command_mode:
        parser.error("give -m for a module or -c for a command, not both.")
    per_node = chosen.nproc
    if per_node is None:
        import torch  # noqa: PLC0415  (only to count GPUs)

        per_node = max(torch.cuda.device_count(), 1)
    world_size = per_node if chosen.world_size is None else chosen.world_size
    if world_size % per_node:
        parser.error(f"--world_size must be a multiple of --nproc={per_node}, got {world_size}.")
    node_rank = chosen.node_rank
    if node_rank is None and chosen.base_rank is not None:
        if chosen.base_rank % per_node:
            parser.error(f"--base_rank must be a multiple of --nproc={per_node}, got {chosen.base_rank}.")
        node_rank = chosen.base_rank // per_node
    where = {
        "--nnodes": world_size // per_node if world_size > per_node else None,
        "--node-rank": node_rank,
        "--master-addr": chosen.master_addr,
        "--master-port": chosen.master_port,
    }
    given = [f"{option}={value}" for option, value in where.items() if value is not None]
    mode = ["--module"] * chosen.module_mode + ["--no-python"] * chosen.command_mode
    return [*(given or ["--standalone"]), f"--nproc-per-node={per_node}", *mode, chosen.program, *chosen.arguments]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _not_available(_: str) -> NoReturn:
    raise argparse.ArgumentTypeError(
        "not available: run torchrun with --redirects=3 --log-dir=FOLDER, which writes the output of each process to a "
        "file."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="composer",
        description="Start a training in several processes with torchrun, whose command is printed.",
        epilog="Train by a configuration: composer train --help",
    )
    parser.add_argument("-n", "--nproc", type=_positive, help="processes on this machine; by default one for each GPU")
    parser.add_argument("--stdout", type=_not_available, help="not available: see torchrun --redirects")
    parser.add_argument("--stderr", type=_not_available, help="not available: see torchrun --redirects")
    version = f"composer-trainer {sys.modules['composer'].__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    parser.add_argument("-v", "--verbose", action="store_true", help="accepted for compatibility")
    parser.add_argument("-m", "--module_mode", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument("-c", "--command_mode", action="store_true", help="the program is any command")
    parser.add_argument("--world_size", type=_positive, help="processes on all machines")
    parser.add_argument("--base_rank", type=int, help="rank of the first process on this machine")
    parser.add_argument("--node_rank", type=int, help="rank of this machine")
    parser.add_argument("--master_addr", help="address of the machine with rank 0")
    parser.add_argument("--master_port", type=_positive, help="port of the machine with rank 0")
    parser.add_argument("program", help="path of the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


if __name__ == "__main__":
    main()
