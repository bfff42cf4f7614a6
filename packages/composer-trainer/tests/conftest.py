"""The small run of the trainer's tests."""

import pytest

from fixtures import make_classifier, make_loader, small_run, weights


@pytest.fixture
def make_trainer():
    """Return ``small_run``, with the functions for its parts as attributes."""

    def make(**options):
        return small_run(**options)

    make.model, make.loader, make.weights = make_classifier, make_loader, weights
    return make
