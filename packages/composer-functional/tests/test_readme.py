"""The README's code runs."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_code_blocks_run(capsys):
    """All Python blocks run in order in one namespace, and training lowers the loss."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    namespace: dict[str, object] = {}

    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)

    first, *_, last = namespace["losses"]
    assert last < first
    assert "2 modules replaced" in capsys.readouterr().out
