"""What the search of the site reads: a record for each section, with its heading and first sentences.

Sphinx's own search finds a page only if it has every word of the query. ``static/search.js`` ranks these records, and
needs neither a server nor a network.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx

GROUPS = {
    "Guides": ("start", "tutorials", "guides", "how_do_i", "moving", "how_it_works"),
    "Methods": ("methods",),
    "Reference": ("reference",),
    "Evidence and developing": ("evidence", "decisions", "developing"),
}
LONGEST = 300
"""The characters below a heading that are searched."""
SYNONYMS = Path(__file__).with_name("synonyms.toml")


def records(page: str, doctree: nodes.document, synonyms: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield what is searched of a page, by section and its key in the synonyms; nothing without a group."""
    group = next((name for name, folders in GROUPS.items() if page.split("/", 1)[0] in folders), None)
    title = ""
    for section in doctree.findall(nodes.section) if group else ():
        heading, place = section[0].astext(), section["ids"][0]
        key = f"{page}#{place}" if title else page  # the first heading is that of the page
        parts = {"page": page, "group": group, "heading": heading, "text": text_below(section)}
        yield key, parts | {"synonyms": synonyms.get(key, "")} | ({"place": place, "title": title} if title else {})
        title = title or heading


def text_below(section: nodes.section) -> str:
    """Return the first sentences below a heading, or those of the first description or section inside."""
    texts = [node for node in section.children if isinstance(node, nodes.paragraph)]
    texts = texts or list(section.findall(nodes.paragraph))[:3]
    return " ".join(" ".join(node.astext() for node in texts).split())[:LONGEST]


def write(app: Sphinx, error: Exception | None) -> None:
    """Write the records as a script, which a page may load from the file system, too."""
    if error is not None or app.builder.name != "html":
        return
    synonyms = tomllib.loads(SYNONYMS.read_text("utf-8"))
    pages = ((page, app.env.get_doctree(page)) for page in sorted(app.env.found_docs))
    found = dict(one for page, tree in pages for one in records(page, tree, synonyms))
    if unknown := sorted(synonyms.keys() - found.keys()):
        message = f"{SYNONYMS.name} must name pages and sections of the site, got {', '.join(unknown)}"
        raise ValueError(message)
    lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in found.values())
    Path(app.outdir, "_static", "search_pages.js").write_text(f"const SEARCHED = [\n{lines}\n];\n", "utf-8")
