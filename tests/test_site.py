"""The site builds without a warning, lists every public name, and reads well in a browser."""

import functools
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
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


@functools.cache
def resolve(folder, path):
    """Return the file of a link in a folder, and whether it exists; pages of a folder have hundreds of equal links."""
    file = (folder / unquote(path)).resolve()
    return file, file.exists()


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
                linked, exists = resolve(file.parent, parts.path) if parts.path else (file, True)
                # The back links of sphinx.ext.viewcode may name a class by a module that only imports it.
                is_source = "_modules" in file.parts or linked not in pages
                anchors = {unquote(parts.fragment)} if is_source else pages[linked].anchors
                if not exists or (parts.fragment and unquote(parts.fragment) not in anchors):
                    broken.append(f"{file.relative_to(site)}: {target}")

        assert broken == []

    def test_nothing_is_loaded_from_elsewhere(self, pages):
        """No page needs the network to be displayed."""
        loaded = {target for page in pages.values() for target in page.loaded}

        assert {target for target in loaded if urlsplit(target).netloc} == set()


@pytest.fixture(scope="module")
def address(site):
    """Serve the site on the loopback; return its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    """Start Chromium without a window, with its driver; skip if one of them is not installed."""
    programs = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if None in programs:
        pytest.skip("Chromium and chromedriver are not installed (Debian: chromium, chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(programs[1]))
    yield driver
    driver.quit()


WIDTHS = {"desktop": 1280, "phone": 390}
READ = ["index.html", "guides/trainer.html", "methods/mixup.html", "how_it_works/events.html"]
READ += ["reference/api/composer.trainer.Trainer.html", "tutorials/image_classifier.html"]


SEARCHES = tomllib.loads((ROOT / "tests" / "fixtures" / "searches.toml").read_text())


def search(browser, address, kind):
    """Yield each query with the pages of its results and those that are on its subject."""
    from selenium.webdriver.support.wait import WebDriverWait

    for words, pages in SEARCHES[kind].items():
        browser.get(f"{address}/search.html?q={words.replace(' ', '+')}")
        WebDriverWait(browser, 30).until(lambda _, words=words: browser.execute_script(IS_SEARCHED, words))
        yield words, (browser.execute_script(RESULTS)[:3], {f"/{page}.html" for page in pages.split()})


class TestInABrowser:
    """The site as a reader sees it."""

    @pytest.mark.parametrize("kind", SEARCHES)
    def test_search_finds(self, browser, address, kind):
        """A page on the subject is one of the first three results: of 9 in 10 questions, and of all single words."""
        missed = {words: found for words, found in search(browser, address, kind) if not found[1] & {*found[0]}}

        assert len(missed) <= len(SEARCHES[kind]) // 10, missed
        assert not {"early stopping", "weight averaging"} & {*missed}

    def test_search_needs_no_server(self, browser, site):
        """It works from the file system, and states when no page has one of the words."""
        browser.get(f"{(site / 'search.html').as_uri()}?q=mixup")
        first = browser.execute_script(RESULTS)[0]
        browser.get(f"{(site / 'search.html').as_uri()}?q=xyzzyx")

        assert first.endswith("methods/mixup.html")
        assert "No page has one of these words." in browser.execute_script("return document.body.textContent")

    def test_long_lines_of_code_wrap(self, browser, address):
        """Code of Python is not wider than its box on a desktop, also where a line is longer than 88 columns."""
        size = {"width": WIDTHS["desktop"], "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        wide = {}
        for page in ("guides/several_processes.html", "guides/stopping_and_going_on.html", "guides/schedules.html"):
            browser.get(f"{address}/{page}")
            wide[page] = browser.execute_script(WIDE)

        assert not any(wide.values()), wide

    @pytest.mark.parametrize("theme", ["light", "dark"])
    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("page", READ)
    def test_pages_are_readable(self, browser, address, page, width, theme):
        """Text has a contrast of at least 4.5 to its background, nothing overflows, and there is no console error."""
        size = {"width": WIDTHS[width], "height": 900, "deviceScaleFactor": 1, "mobile": width == "phone"}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(f"{address}/{page}")
        browser.execute_script(SET_THEME, theme)

        overflow = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
        contrast = browser.execute_script(CONTRAST)
        errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]

        assert overflow <= 0
        assert contrast >= 4.5
        assert errors == []


# The pages of the results, also of their headings.
RESULTS = "return [...document.querySelectorAll('ul.search > li > a')].map(link => link.pathname)"
IS_SEARCHED = """
    return document.querySelector("form.bd-search input")?.value === arguments[0]
        && document.getElementById("search-results").childNodes.length > 0;
"""
WIDE = """
    return [...document.querySelectorAll(".highlight-python pre")]
        .filter(code => code.scrollWidth > code.clientWidth + 1).map(code => code.textContent.slice(0, 80));
"""
SET_THEME = "document.documentElement.dataset.mode = document.documentElement.dataset.theme = arguments[0]"
# The ratio of the luminances of text and background, as WCAG defines it, for the paragraphs of the page.
CONTRAST = """
    const luminance = color => {
        const parts = color.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255);
        const linear = parts.map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    };
    const values = [getComputedStyle(document.querySelector("article p")).color,
                    getComputedStyle(document.body).backgroundColor].map(luminance).sort((a, b) => b - a);
    return (values[0] + 0.05) / (values[1] + 0.05);
"""
