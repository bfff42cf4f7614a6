"""The site builds without a warning, lists every public name."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from urllib.parse import unquote, urlsplit

import pytest

import composer

ROOT = Path(__file__).parents[1]
sphinx = pytest.importorskip("sphinx", reason="the site is built with Sphinx, which nox -s docs installs")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site with warnings as errors; return its folder."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--nitpicky", "--fail-on-warning", "--keep-going", "--quiet", "--jobs=2"]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(folder)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


class Page(HTMLParser):
    """The targets of a page's links and images, those that are loaded with it, and the names of places in it."""

    def __init__(self, file):
        super().__init__()
        self.targets, self.anchors, self.loaded = set(), set(), set()
        self.feed(file.read_text())

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors.update(given[key] for key in ("id", "name") if given.get(key))
        self.targets.update(given[key] for key in ("href", "src") if given.get(key))
        if tag != "a":
            self.loaded.update(given[key] for key in ("href", "src") if given.get(key))


@pytest.fixture(scope="module")
def pages(site):
    """Return the pages of the site by their file."""
    return {file: Page(file) for file in site.rglob("*.html") if "_static" not in file.parts}


def public_names():
    """Return the full names of all public names, each with the object."""
    names = {}
    for module in [composer, *map(import_module, _public_modules())]:
        for name in getattr(module, "__all__", []):
            names[f"{module.__name__}.{name}"] = getattr(module, name)
    return names


def _public_modules():
    for module in walk_packages(composer.__path__, "composer."):
        private = any(part.startswith("_") for part in module.name.split("."))
        if not private and (module.ispkg or module.name.startswith("composer.integrations.")):
            yield module.name


class TestReference:
    """The reference, compared with the packages."""

    def test_lists_every_public_name(self, site):
        """Each public name has an entry, or is one of those that its module lists as documented in another one."""
        from sphinx.util.inventory import InventoryFile

        inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
        documented = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
        missing = []
        for name in public_names().keys() - documented:
            module, _, last = name.rpartition(".")
            listed = (site / "reference" / "api" / f"{module}.html").read_text()
            if not re.search(rf"composer\.[\w.]+\.{last}\b", listed):
                missing.append(name)

        assert missing == []

    def test_links_types_and_source(self, site):
        """A signature links a class of this library, one of torch, and the source."""
        page = (site / "reference" / "api" / "composer.core.Engine.html").read_text()
        kernel = (site / "reference" / "api" / "composer.functional.mixup_batch.html").read_text()

        assert 'href="composer.core.State.html#composer.core.State"' in page
        assert 'href="https://docs.pytorch.org/docs/stable/tensors.html#torch.Tensor"' in kernel
        assert "_modules/composer/functional/augmentations/mixup.html#mixup_batch" in kernel


class TestPages:
    """The HTML, without a browser."""

    def test_links_within_the_site_are_valid(self, site, pages):
        """The file and the anchor of every link exist."""
        broken = []
        for file, page in pages.items():
            for target in page.targets:
                parts = urlsplit(target)
                if parts.scheme or parts.netloc or (not parts.path and not parts.fragment):
                    continue
                linked = (file.parent / unquote(parts.path)).resolve() if parts.path else file
                anchors = pages[linked].anchors if linked in pages else {unquote(parts.fragment)}
                if not linked.exists() or (parts.fragment and unquote(parts.fragment) not in anchors):
                    broken.append(f"{file.relative_to(site)}: {target}")

        assert broken == []

    def test_nothing_is_loaded_from_elsewhere(self, pages):
        """No page needs the network to be displayed."""
        loaded = {target for page in pages.values() for target in page.loaded}

        assert {target for target in loaded if urlsplit(target).netloc} == set()
