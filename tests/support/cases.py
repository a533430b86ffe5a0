"""Mark cases of parametrised tests that `make test` leaves to another command; read golden cases."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

GOLDEN_FOLDER = Path(__file__).parent / "golden"  # what the code of others returned
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="torch.compile needs a C compiler")


def full(*values: Any) -> Any:
    """Return a case for `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.full)


def slow(*values: Any) -> Any:
    """Return a case for `make prove`."""
    return pytest.param(*values, marks=pytest.mark.slow)
