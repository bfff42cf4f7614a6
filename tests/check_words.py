"""Finds phrases that are not plain technical English, in Python files, in names of tests and in pages.

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
    "anew": "again, from the start",
    "as well as it can": "as far as possible",
    "at last": "finally",
    "by hand": "manually, plain (loop), worked-out (formula)",
    "changes no bit": "does not change results",
    "(come|comes|came) to": "equals, produces, reaches",
    "(go|goes|went) by the": "depend on, are identified by",
    "gone through": "iterated, fast-forwarded, checked",
    "(give|gives|given) back": "return, restore",
    "(hand|hands|handed) (on|over)": "pass",
    "(hang|hangs|hung) on": "depend on",
    "(hold|holds|held) (itself|ourselves) to": "the limit is",
    "in its stead": "instead",
    "(let|lets|letting) go": "release, free",
    "looked at": "checked, read",
    "made again": "created again, reconstructed",
    "made up": "generated, invented",
    "mend|mends|mended": "fix, correct",
    "of ours": "of this library",
    "of one's own": "custom",
    "only one side has": "missing or unexpected",
    "(put|puts) back": "restore",
    "(stand|stands|stood) in for": "replace, represent",
    "such and such": "name it",
    "(take|takes|taken) down": "record",
    "(tell|tells|telling) of": "report",
    "to be had": "available",
    "to the bit": "bit-identical",
    "to the bits|to the same bits": "bit-identical",
    "told": "reported, passed, distinguished",
    "true size": "unscale",
    "whole or not|as a whole or not|whole or nothing": "written atomically",
    "with nothing left to do": "if training is already complete",
    "without a word": "silently, without a warning",
    "(has|have|had) (no )?words for": "supports, does not support",
    "(is|are|no|not) whole(?! (number|epoch|batch|step))": "complete, valid",
    "it all": "all of them, name it",
    "(make|makes|made) of `": "outputs, results",
    "(stand|stands|stood) still": "wait, does not advance",
    "came to": "equal, the computed values",
    # Only in phrases: pages have text, hosts have addresses, and `refused` is a parameter of the contract suite.
    "(a|an|any|each|empty|one|several) (empty )?texts?(?! (file|metric))": "string",
    "(list|lists|are|or|keys are) (of )?texts": "strings",
    "(at|or|to) an address|a remote address|remote addresses": "URL",
    "refuse|refuses|refusing|refusals?": "reject, raise an error",
    "(are|be|been|is|was|were) refused": "raise an error, are rejected",
    "gave": "passed, returned, printed",
}
# Names of functions and classes to avoid in all files.
NAMES = {
    "Meeting": "the conversation's purpose",
    "Rest": "what it contains",
    "_age": "what it computes",
    "_clashes": "conflicts, differs",
    "_like": "match_shape, convert_to",
    "_make_way": "rename, delete",
    "_moved": "map_points, to_device",
    "_plain": "as_tensor, to_data, to_json",
    "_stays": "is_kept, is_unchanged",
    "goes_on": "continues",
    "hurry": "what it does",
    "moved": "what it maps or copies",
}
# Phrases to avoid in names of tests, helpers and classes of tests; a space matches an underscore.
NAMES_IN_TESTS = {
    "ask|asked|asks": "is_due, called",
    "begin anew|begins anew|anew": "restart",
    "by hand": "matches_the_formula, worked_example, reference_",
    "(are|is) refused": "raise, raises",
    "(come|comes|came) back": "round_trip, restored",
    "(go|goes|going|went) on": "continues, resumes",
    "know|knows": "has, supports",
    "(let|lets) go": "released",
    "(left|leaves) alone": "unchanged",
    "nobody": "no component, none",
    "no bit": "does_not_change",
    "ones own|one s own": "custom",
    "say|says|said": "warns, raises, states",
    "stir": "randomize",
    "tell|tells|told": "reported, raises",
    "what is no": "invalid, non_",
}
# Words to avoid in the sources and examples of the packages.
IN_SOURCES = {
    "knows": "contains, supports",
    "says|say|said": "states, defines, prints, names",
}
# Words to avoid in all files outside of the packages.
OUTSIDE_PACKAGES = {
    "asks|asked": "calls, requires, requested",
    "hence": "therefore",
    "knows|know": "contains, depends on, is known",
    "nobody": "no component, not",
    "says|say|said": "states, defines, shows",
    "tells|tell": "reports, describes",
    "upon": "on",
}


def find_names(text: str, phrases: dict[str, str]) -> list[tuple[int, str, str]]:
    """Return the line, the phrase and the better wording of all names of functions and classes that contain one."""
    result = []
    for definition in re.finditer(r"\b(?:def|class) (\w+)", text):
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", definition[1]).replace("_", " ")
        line = text.count("\n", 0, definition.start()) + 1
        result += [(line, f"{definition[1]}: {phrase}", better) for _, phrase, better in find(words, phrases)]
    return result


def find_exact_names(text: str) -> list[tuple[int, str, str]]:
    """Return the line, the name and what to name instead of the definitions in NAMES."""
    definitions = re.finditer(rf"\b(?:def|class) ({'|'.join(NAMES)})\b", text)
    return [(text.count("\n", 0, each.start()) + 1, each[1], NAMES[each[1]]) for each in definitions]


def find(text: str, words: dict[str, str]) -> list[tuple[int, str, str]]:
    """Return the line, the phrase and the better wording of all that is found in a text, in the order of ``words``."""
    result = []
    for phrase, better in words.items():
        pattern = rf"\b(?:{phrase})\b".replace(" ", r'(?:\s|[#>*]|"|\bf")+')
        matches = re.finditer(pattern, text, re.IGNORECASE)
        result += [(text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), better) for match in matches]
    return result


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
        in_package, in_tests = name.startswith("packages/"), "tests" in path.parts
        words = EVERYWHERE | (OUTSIDE_PACKAGES if not in_package else {} if in_tests else IN_SOURCES)
        text = path.read_text()
        in_names = find_names(text, NAMES_IN_TESTS) if in_tests and path.suffix == ".py" else []
        in_names += find_exact_names(text)
        for line, phrase, better in [*find(text, words), *in_names]:
            print(f"{name}:{line}: {phrase!r}; better: {better}")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
