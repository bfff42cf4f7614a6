"""The public classes of each argument of the trainer."""

import pytest

import composer.algorithms
from composer.trainer.tools.components import registered


@pytest.mark.parametrize("name", ["os.system", "torch.optim.SGD", "print", "Algorithm", "Callback", "Optimizer"])
@pytest.mark.parametrize("argument", ["algorithms", "callbacks", "loggers", "optimizers", "schedulers"])
def test_only_public_names(name, argument):
    """Abstract classes, paths of modules and other functions are not listed."""
    assert name not in registered(argument)


def test_all_algorithms():
    """All public algorithms are listed, and nothing else of their module."""
    names = registered("algorithms")

    assert {"MixUp", "SAM"} < names.keys() < {*composer.algorithms.__all__}
    assert "SqueezeExcite2d" not in names
