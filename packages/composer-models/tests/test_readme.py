"""The README's code and output are correct."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_code_blocks_run(capsys):
    """All Python blocks run in order, and the last prints both metrics."""
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)

    exec(compile("\n".join(blocks), str(README), "exec"), {})

    assert re.fullmatch(r"CrossEntropy tensor\(.*\)\nMulticlassAccuracy tensor\(.*\)\n", capsys.readouterr().out)
