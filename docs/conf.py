"""Settings of the site, which ``nox -s site`` builds."""

import enum
import os
import re
import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "_site"))

import public_names
import search_pages
import type_hints

type_hints.complete()
type_hints.use_public_names()
shutil.rmtree(DOCS / "reference" / "api", ignore_errors=True)  # pages of names that no longer exist

project = "composer"
author = "the authors of composer"
copyright = "2026, the authors of composer"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_site", "inventories"]
templates_path = ["_site/templates"]
default_role = "code"
suppress_warnings = ["config.cache"]  # functions in autosummary_context cannot be pickled

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
copybutton_exclude = ".linenos, .gp, .go"

autosummary_context = {"groups": public_names.groups, "elsewhere": public_names.elsewhere}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
maximum_signature_line_length = 88

# The inventories list only the names that are referenced; a build needs no network.
DOCUMENTATION = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "torchvision": "https://docs.pytorch.org/vision/stable/",
    "torchmetrics": "https://lightning.ai/docs/torchmetrics/stable/",
    "kornia": "https://kornia.readthedocs.io/en/latest/",
}
intersphinx_mapping = {name: (url, f"inventories/{name}.txt") for name, url in DOCUMENTATION.items()}

nitpicky = True
nitpick_ignore_regex = [
    # Classes of optional libraries.
    ("py:class", r"(accelerate|concurrent|ignite|lightning|matplotlib|peft|transformers)\..+|Axes"),
    ("py:class", r"torch\.(nn\.modules\.batchnorm\._BatchNorm|OutOfMemoryError|utils\.hooks\.RemovableHandle)"),
    ("py:class", r"torch\.(distributed\.distributed_c10d\.ProcessGroup|utils\.data\.distributed\.DistributedSampler)"),
    # Types that are not public: type variables, aliases, and values that are only passed on.
    ("py:class", r"composer\.(.+\.)?(_\w+|T|Batch|Sample|Target|Counts|Entry|ObservableList|DetectionModel|Settings)"),
    ("py:class", r"composer\.(.+\.)?Images"),
    ("py:class", r"composer\.(.+\.)?(Assembly|Clock|Difference|Folder|GatheringLogger|HasOptimizers|HostAlgorithms)"),
    ("py:class", r"composer\.(.+\.)?(LocalFolder|RemoteFolder|SavedRun)"),
    ("py:class", r"composer\.(.+\.)?(CountExchange|PhaseMetricsModel|Record|Recording|Result|Row)"),
    ("py:obj", r"composer\.core\.time\.Value"),
    ("py:class", r"Box|BoxFormat|(composer\.trainer\.tools\.summary\.)?Layer|Number|ParallelStyle|Target|TokenCount"),
    ("py:obj", r"composer\.functional\.augmentations\.annotations\.(Batch|Target)"),
    ("py:class", r"Declaration|EvalInterval|Fit|ObservableList|Points|Schedule"),
]

html_context = {"default_mode": "auto"}
html_theme = "pydata_sphinx_theme"
html_title = "composer"
html_favicon = "_site/static/icon.svg"
html_show_sourcelink = False
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_theme_options = {
    "show_prev_next": False,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "header_links_before_dropdown": 6,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}

# Pages of the repository that are outside this folder, and where the site shows them.
OUTSIDE = {
    "developing/architecture": "ARCHITECTURE.md",
    "developing/security": "SECURITY.md",
    "developing/changelog": "CHANGELOG.md",
    "developing/contributing": "CONTRIBUTING.md",
    "evidence/benchmarks": "benchmarks/README.md",
    "start/functional": "packages/composer-functional/README.md",
    "start/engine": "packages/composer-engine/README.md",
    "start/models": "packages/composer-models/README.md",
    "start/trainer": "packages/composer-trainer/README.md",
}
REFERENCE = re.compile(r"(?<=\]\()[./]*reference/index\.md(?=#composer)")
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def read_source(app, name, source):
    """Replace a page that only names a file outside this folder by that file, and make its links those of the site."""
    place = DOCS / f"{name}.md"
    folder = place.parent
    if name in OUTSIDE:
        text = (DOCS.parent / OUTSIDE[name]).read_text()
        folder = (DOCS.parent / OUTSIDE[name]).parent
    elif place.exists():
        text = source[0]
    else:
        return
    shown = {(DOCS.parent / file).resolve(): DOCS / f"{page}.md" for page, file in OUTSIDE.items()}
    shown[DOCS.parent / "README.md"] = DOCS / "index.md"

    def target(link):
        file = (folder / link[1]).resolve()
        file = shown.get(file, file / "index.md" if (file / "index.md").exists() else file)
        return os.path.relpath(file, place.parent)

    source[0] = LINK.sub(target, REFERENCE.sub("", text))  # MyST finds #composer.core.State in the reference


def process_docstring(app, what, name, obj, options, lines):
    """Add a missing comment of a value; with an empty first line, Napoleon reads no type before a colon."""
    if not getattr(obj, "__module__", "").startswith("composer."):
        lines[:] = public_names.comment(name) or lines
    if what in {"attribute", "data", "property"}:
        lines.insert(0, "\\")


def keep_public_bases(app, name, obj, options, bases):
    """Replace bases that are not public by their own bases."""
    while private := [base for base in bases if not public_names.is_documented(base)]:
        for base in private:
            place = bases.index(base)
            bases[place : place + 1] = [other for other in base.__bases__ if other not in bases]


def skip_member(app, what, name, obj, skip, options):
    """Document all members of enumerations, also those without a comment."""
    return False if isinstance(obj, enum.Enum) else None


def find_public_name(app, env, node, contnode):
    """Resolve a class of this library without its module, as in type hints that are strings, or of its top level."""
    domain, name = env.domains.python_domain, node.get("reftarget", "").removeprefix("composer.")
    homes = [
        full for full in domain.objects if full.rpartition(".")[2] == name and domain.objects[full].objtype == "class"
    ]
    homes = [full for full in homes if not domain.objects[full].aliased]
    if node.get("refdomain") == "py" and len(homes) == 1:
        return domain.resolve_xref(env, node["refdoc"], app.builder, "class", homes[0], node, contnode)
    return None


def setup(app):
    app.connect("missing-reference", find_public_name)
    app.connect("source-read", read_source)
    app.connect("autodoc-process-docstring", process_docstring, priority=400)
    app.connect("autodoc-process-bases", keep_public_bases)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("build-finished", search_pages.write)
