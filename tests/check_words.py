"""Finds phrases that are not plain technical English, in Python files and in pages.

``python tests/check_words.py`` prints each place with a better wording, and exits with 1 if there is any. A phrase is a
regular expression in which a space matches any break between two words: also the end of a line, of a comment or of one
of several adjacent string literals. Case does not matter.
"""

import re
import subprocess
import sys
from pathlib import Path

# Phrases to avoid in all files, and what to write instead.
EVERYWHERE = {
    "such and such": "name it",
    "as well as it can": "as far as possible",
}
# Phrases to avoid in all files outside of the packages.
OUTSIDE_PACKAGES = {
    "(has|have|had) (no )?words for": "supports, does not support",
    "that (it|they) would have come to": "bit-identical results",
    "whole or not (there|at all)": "written atomically",
}


def find(text: str, words: dict[str, str]) -> list[tuple[int, str, str]]:
    """Return the line, the phrase and the better wording of all that is found in a text, in the order of ``words``."""
    found = []
    for phrase, better in words.items():
        pattern = rf"\b(?:{phrase})\b".replace(" ", r'(?:\s|[#>*]|"|\bf")+')
        matches = re.finditer(pattern, text, re.IGNORECASE)
        found += [(text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), better) for match in matches]
    return found


def main() -> int:
    """Check all tracked Python files and pages of the repository; return the exit status."""
    root = Path(__file__).parents[1]
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    failed = False
    for name in names:
        path = root / name
        if not path.exists() or path == Path(__file__):
            continue
        words = EVERYWHERE if name.startswith("packages/") else EVERYWHERE | OUTSIDE_PACKAGES
        for line, phrase, better in find(path.read_text(), words):
            print(f"{name}:{line}: {phrase!r}; better: {better}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
