"""What ``help()`` prints for the public names of all packages."""

import importlib
import inspect
import pkgutil
import pydoc

import pytest

import composer

HOSTS = ["composer.integrations.accelerate", "composer.integrations.ignite", "composer.integrations.lightning"]
HOSTS += ["composer.integrations.transformers"]


def public():
    """Return the public functions and classes of all packages, by full name."""
    packages = [module.name for module in pkgutil.walk_packages(composer.__path__, "composer.") if module.ispkg]
    modules = [importlib.import_module(name) for name in [*packages, *HOSTS]]
    found = {f"{one.__name__}.{name}": getattr(one, name) for one in modules for name in getattr(one, "__all__", [])}
    return {name: value for name, value in found.items() if inspect.isclass(value) or inspect.isroutine(value)}


def annotations(value):
    """Yield the annotations of a function, or of all methods of a class that this library defines."""
    methods = [method for _, method in inspect.getmembers(value, inspect.isroutine)] if inspect.isclass(value) else []
    for one in [value, *methods]:
        if not inspect.isclass(one) and callable(one) and str(getattr(one, "__module__", None)).startswith("composer."):
            signature = inspect.signature(one)
            yield from [*(parameter.annotation for parameter in signature.parameters.values())]
            yield signature.return_annotation


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
def test_no_annotation_has_quotes(name):
    """Annotations in signatures print as they are in the source."""
    texts = [inspect.formatannotation(annotation) for annotation in annotations(PUBLIC[name])]

    assert [text for text in texts if text.startswith(("'", '"', "ForwardRef"))] == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (composer.functional.mixup_batch, "mixing: float | None = None"),
        (composer.Trainer, "max_duration: int | str | Time | None = None"),
        (composer.algorithms.EMA, "apply(self, event: Event, state: State, logger: Logger) -> None"),
        (composer.models.ComposerClassifier, "module: nn.Module"),
    ],
)
def test_help(value, text):
    """The help of a function or class has the annotations of the source."""
    assert text in " ".join(pydoc.plain(pydoc.render_doc(value)).split())
