"""Read the rows of a JSONL file, and wait for a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commands import Running


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()]


def wait_until(holds: Callable[[], bool], run: Running) -> None:
    while not holds():
        assert run.poll() is None, "the run ended by itself"
        time.sleep(0.02)
