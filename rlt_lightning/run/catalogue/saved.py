"""The entries of a run that are not ours, as `catalogue.json` in its folder.

A run imports the file of its reward, which registers its entries. What reads the run later does not:

    rlt fit, validate, …    write_entries →    RUN/catalogue.json    → read_entries    rlt report, dashboard
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rlt_lightning.run.catalogue import registry
from rlt_lightning.run.catalogue.entry import Metric
from rlt_lightning.run.catalogue.registry import OURS, metrics
from rlt_lightning.types import InputError

CATALOGUE = "catalogue.json"


def write_entries(folder: Path) -> None:
    """Write the registered entries that are not ours into a run folder; write no file if there are none."""
    path = folder / CATALOGUE
    own = [asdict(metric) for metric in metrics() if metric not in OURS]
    if not own:
        path.unlink(missing_ok=True)
        return
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(own, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    scratch.replace(path)


def read_entries(folder: Path) -> None:
    """Register the entries of a run folder, if it has any. An entry that is known already stays as it is.

    Raises:
        InputError: If the file is not as rlt writes it.
    """
    path = folder / CATALOGUE
    if not path.exists():
        return
    try:
        found = [Metric(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
        for value in (value for metric in found for value in asdict(metric).values()):
            if not isinstance(value, str | None):
                raise TypeError(f"{value!r} is no text")
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{path} must hold the entries of metrics that rlt wrote, but does not ({error}). Restore it, or "
            "move it away: its metrics then have only a name."
        ) from error
    for metric in found:
        registry.entries.setdefault(metric.name, metric)
