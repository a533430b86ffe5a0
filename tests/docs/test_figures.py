"""The figures that pages quote equal those in the benchmarks' files, docs/benchmarks/*.json."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from commands import ROOT

spec = importlib.util.spec_from_file_location("quote_figures", ROOT / "scripts" / "quote_figures.py")
assert spec is not None
assert spec.loader is not None
quotes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quotes)

TABLE = yaml.safe_load((ROOT / "docs" / "benchmarks" / "quotes.yaml").read_text())


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


def test_a_sentence_or_file_that_is_missing_is_noticed(pages: Path) -> None:
    (pages / "page.md").write_text("It is fast.\n")
    assert "must say once" in quotes.differences(pages, write=False)[0]
    (pages / "page.md").write_text("4.7 times, 4.00 GiB")
    (pages / "docs" / "benchmarks" / "speed.json").unlink()
    assert "there is no file" in quotes.differences(pages, write=False)[0]


def test_a_dash_stands_for_a_figure_only_without_a_file(pages: Path) -> None:
    (pages / "page.md").write_text("It is – times, – GiB.\n")
    [wrong] = quotes.differences(pages, write=False)
    assert "'– times, – GiB', but the files say '4.7 times, 4.00 GiB'" in wrong
    file, table = (pages / "docs" / "benchmarks" / name for name in ("speed.json", "quotes.yaml"))
    written = file.read_text()
    file.unlink()
    table.write_text(table.read_text().replace('"unwritten": []', '"unwritten": ["speed"]'))
    assert quotes.differences(pages, write=True) == []
    assert (pages / "page.md").read_text() == "It is – times, – GiB.\n"
    file.write_text(written)
    quotes.differences(pages, write=True)
    assert (pages / "page.md").read_text() == "It is 4.7 times, 4.00 GiB.\n"


@pytest.mark.parametrize(
    ("unit", "value", "figure"), [("ms ", 0.0094, "9"), ("more ", 1.058, "6"), ("", 3.2, "3")]
)
def test_a_word_before_a_place_converts_its_figure(unit: str, value: float, figure: str, pages: Path) -> None:
    folder = pages / "docs" / "benchmarks"
    (folder / "speed.json").write_text(json.dumps({"a": {"b, c": value}}))
    assert quotes.rendered(f"{{{unit}speed/a/b, c:.0f}} in all", folder) == f"{figure} in all"


def test_a_file_that_is_there_is_not_called_unwritten(pages: Path) -> None:
    table = pages / "docs" / "benchmarks" / "quotes.yaml"
    table.write_text(table.read_text().replace('"unwritten": []', '"unwritten": ["speed"]'))
    assert "drop it from `unwritten`" in quotes.differences(pages, write=False)[0]


def test_every_row_of_the_figures_is_quoted() -> None:
    page = (ROOT / "research" / "speed.md").read_text()
    rows = re.findall(r"^\| `\w+\.py`.*$", page.split("## Figures")[1].split("\n## ")[0], re.MULTILINE)
    assert len(rows) >= 5
    patterns = [quotes.pattern_of(quote) for quote in TABLE["pages"]["research/speed.md"]]
    for row in rows:
        figure = row.split("|")[3].strip()
        assert any(pattern.fullmatch(figure) for pattern in patterns), f"not in quotes.yaml: {figure}"


def test_files_say_where_they_come_from() -> None:
    for file in (ROOT / "docs" / "benchmarks").glob("*.json"):
        origin = json.loads(file.read_text())["provenance"]
        assert origin.keys() >= {"command", "commit", "date", "machine", "versions"}, file
        assert "--tiny" not in origin["command"], f"{file} is of a size that shows only that it works"


def test_the_script_names_every_benchmark_with_a_file() -> None:
    script = (ROOT / "scripts" / "benchmarks.sh").read_text()
    default = re.search(r"^default=\(([a-z ]+)\)", script, re.MULTILINE)
    known = re.search(r'^known=\("\$\{default\[@\]\}" ([a-z_ ]+)\)', script, re.MULTILINE)
    assert default is not None
    assert known is not None
    names = {*default[1].split(), *known[1].split()}
    quoted = {name for found in TABLE["pages"].values() for quote in found for name in quotes.files_of(quote)}
    assert quoted <= names
    assert {file.stem for file in (ROOT / "docs" / "benchmarks").glob("*.json")} <= names
    assert set(TABLE["unwritten"]) <= names
    done = subprocess.run(
        [str(ROOT / "scripts" / "benchmarks.sh"), "plans"], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, "NAME must be one of reward" in done.stderr) == (2, True)
