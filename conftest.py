"""What all tests share."""

import pytest


def pytest_collection_modifyitems(items):
    """Skip the tests that are marked ``gpu`` on a machine without one."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # noqa: PLC0415  (no test of a package without GPU tests waits for it)

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
