"""Cases of parametrised tests that `make test` leaves to another command."""

from __future__ import annotations

from typing import Any

import pytest


def full(*values: Any) -> Any:
    """Return a case for `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.full)


def slow(*values: Any) -> Any:
    """Return a case for `make prove`."""
    return pytest.param(*values, marks=pytest.mark.slow)
