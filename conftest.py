"""Configuration of all tests."""

import pytest


def pytest_collection_modifyitems(items):
    """Skip the tests that are marked ``gpu`` if there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # noqa: PLC0415  (not imported for packages without GPU tests)

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
