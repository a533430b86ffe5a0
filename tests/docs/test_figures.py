"""The figures that pages quote equal those in the benchmarks' files, docs/benchmarks/*.json."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from commands import ROOT

spec = importlib.util.spec_from_file_location("quote_figures", ROOT / "scripts" / "quote_figures.py")
assert spec is not None
assert spec.loader is not None
quotes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quotes)


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """A folder with one page that quotes two figures, 4.7 and a quarter of 16 GiB, and their file."""
    folder = tmp_path / "docs" / "benchmarks"
    folder.mkdir(parents=True)
    sentence = "{speed/figures/ratio:.1f} times, {gib speed/ours/peak_bytes:.2f} GiB"
    (folder / "quotes.yaml").write_text(json.dumps({"unwritten": [], "pages": {"page.md": [sentence]}}))
    (folder / "speed.json").write_text(
        json.dumps({"figures": {"ratio": 4.71}, "ours": {"peak_bytes": 2**32}})
    )
    (tmp_path / "page.md").write_text("It is 4.7 times, 4.00 GiB, and 3 other things.\n")
    return tmp_path


def test_pages_and_files_agree() -> None:
    assert quotes.differences(ROOT, write=False) == []


def test_a_file_that_changes_is_noticed_and_written(pages: Path) -> None:
    assert quotes.differences(pages, write=False) == []
    file = pages / "docs" / "benchmarks" / "speed.json"
    file.write_text(file.read_text().replace("4.71", "5.2"))
    [wrong] = quotes.differences(pages, write=False)
    assert "'4.7 times, 4.00 GiB', but the files say '5.2 times, 4.00 GiB'" in wrong
    assert quotes.differences(pages, write=True) == []
    assert (pages / "page.md").read_text() == "It is 5.2 times, 4.00 GiB, and 3 other things.\n"
