"""The figures that pages quote equal those of files and commands: docs/benchmarks/*.json, `rlt plan`."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from commands import ROOT, rlt

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


OWN, PROMPTS, ROWS = "--config=own_rows/", "--plan.prompt_length=512", "--data.max_rows=4000"
ADAPTERS = ["--config=add/lora", "--model.dtype=bfloat16"]
RECIPE, STRATOS = "--config=recipe_7b/", "--data.max_rows=16710"
SHARDS = ["--config=hardware/fsdp2", "--trainer.devices=8"]
EIGHT = [STRATOS, "--config=hardware/fsdp2_8gpu"]
WORKERS = [STRATOS, "--config=hardware/generate_8gpu"]
FOUR = ["--rollouts.num_traces=4", "--rollouts.max_resamples=0"]
# The rows of docs/costs.md: configs and options of a stage on the larger machine, and on the smaller one.
PLANNED: dict[str, list[list[str]]] = {
    "explain: 4 explanations a row, `explain`": [[f"{OWN}explain", ROWS, PROMPTS]] * 2,
    "own: 4 answers a row, `rejection`": [[f"{OWN}rejection", ROWS, PROMPTS]] * 2,
    "a teacher's fine-tuning, `warmup`": [[f"{OWN}warmup", *way, ROWS, PROMPTS] for way in ([], ADAPTERS)],
    "RLT, `rlt`": [[f"{OWN}rlt", *way, PROMPTS] for way in ([], ADAPTERS)],
    "a teacher's traces, one a row, `generate`": [[f"{OWN}generate", ROWS, PROMPTS]] * 2,
    "a student, `sft`": [[f"{OWN}sft", *way, ROWS, PROMPTS] for way in ([], ADAPTERS)],
    "the teacher's warm-up, `warmup`": [[f"{RECIPE}warmup", *SHARDS, STRATOS]],
    "7B RLT, `rlt`": [[f"{RECIPE}rlt", *EIGHT]],
    "traces, one a row, `generate`": [[f"{RECIPE}generate", *WORKERS]],
    "traces, four a row, `generate`": [[f"{RECIPE}generate", *WORKERS, *FOUR]],
    "a 7B student, `sft`": [[f"{RECIPE}sft", *SHARDS, STRATOS]],
}


def plan_cells(commands: list[list[str]]) -> list[str]:
    """Return what a row of the page says of a stage: hours, GiB, disk, tokens in millions."""
    pages = [
        rlt("plan", *words, *(["--plan.device_gib=23.6"] * number)).stdout
        for number, words in enumerate(commands)
    ]
    first = pages[0]
    per_step = [float(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:sampled|read)", first)]
    time = re.search(r"([\d.]+) hours for ([\d,]+),", first)
    assert time is not None, first
    tokens = [f"{n * int(time[2].replace(',', '')) / 1e6:,.1f}" for n in per_step]
    gib = [re.findall(r"fits: ([\d.]+) GiB of", page)[0] for page in pages]
    disk = [*filter(None, (re.search(r"checkpoints ([\d.,]+) GiB", page) for page in pages))]
    return [time[1], ", ".join(gib), ", ".join(m[1] for m in disk), ", ".join(tokens)]


@pytest.mark.parametrize("stage", PLANNED)
def test_costs_are_those_of_rlt_plan(stage: str) -> None:
    page = (ROOT / "docs" / "costs.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    [row] = [row for row in rows if row and row[0] == stage]
    assert [row[2], *row[4:]] == plan_cells(PLANNED[stage])
    assert float(row[3]) == pytest.approx(int(row[1]) * float(row[2]), abs=0.011)


def test_totals_of_costs_are_the_sums_of_their_rows() -> None:
    page = (ROOT / "docs" / "costs.md").read_text()
    for title, said in (
        ("## 5,000 rows", r"about (\d+) hours on an H100"),
        ("## The 7B", r"about (\d+) hours"),
    ):
        section = page.partition(title)[2].partition("\n## ")[0]
        hours = [float(n) for n in re.findall(r"^\|[^|]+\| \d+ \|[^|]+\| ([\d.]+) \|", section, re.MULTILINE)]
        found = re.search(said, section)
        assert found is not None
        assert round(sum(hours)) == int(found[1])
