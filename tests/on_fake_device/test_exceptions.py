"""The list of steps that wait for the device."""

import re

from on_fake_device.guards import EXCEPTIONS


def test_exceptions(request):
    """There are ten at most, each with a reason, and each is of a test: run all files to see it pass."""
    names = [item.name for item in request.session.items]

    assert len(EXCEPTIONS) <= 10
    assert [part for part in EXCEPTIONS if not any(re.search(part, name) for name in names)] == []
    assert all(waits > 0 and len(reason) > 20 for waits, reason in EXCEPTIONS.values())
