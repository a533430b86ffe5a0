"""Every benchmark runs at its tiny size, and ends with its result.

A file in benchmarks/ that is no benchmark is named in HELPERS. Any other must take --tiny and --output, and
print as its last line `NAME key=value …`. By then it has written its JSON, which says where it comes from.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, Running, make_forked_python
from vllm_runs import EXECUTABLE

FOLDER = ROOT / "benchmarks"
HELPERS = {
    "side_by_side": "what the benchmarks share",
    "small_models": "models for tiny sizes",
    "trl_step": "the other side of optimise.py",
    "unpadded": "an attention of that side, on a GPU",
}
BENCHMARKS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in HELPERS)
NEEDS = {"optimise": "trl"}
OPTIONS = {"optimise": ["--against", "trl"]}  # which must agree in loss and gradients
STARTS_PYTHON = {"asynchronous", "data"}  # several times, by sys.executable
MARKS = {"push": [pytest.mark.vllm]}


def run_benchmark(name: str, output: Path) -> subprocess.CompletedProcess[str]:
    """Run a benchmark at its tiny size as a user would, but in a process that has the package imported."""
    words = [str(FOLDER / f"{name}.py"), "--tiny", *OPTIONS.get(name, []), "--output", str(output)]
    code = f"import runpy, sys; sys.path.insert(0, {str(FOLDER)!r}); sys.argv = {words!r}\n"
    if name in STARTS_PYTHON:
        code += f"sys.executable = {make_forked_python(output.parent)!r}\n"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    environment = {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    process = Running((), None, ROOT, "", environment, code)
    return subprocess.CompletedProcess(words, process.wait(), process.stdout, process.stderr)


def checked_result(name: str, run: subprocess.CompletedProcess[str], output: Path) -> dict[str, Any]:
    """Return what a run wrote, once its last line and its origin are right."""
    assert run.returncode == 0, run.stderr[-2000:]
    last = run.stdout.strip().splitlines()[-1]
    assert re.fullmatch(rf"{name}( \w+=[-+\w.]+)+", last), last
    written: dict[str, Any] = json.loads(output.read_text())
    origin = written["provenance"]
    assert f"benchmarks/{name}.py --tiny" in origin["command"]
    assert origin["machine"]["cores"] >= 1
    assert origin["machine"]["memory_gib"] > 0
    assert origin["machine"]["cpu"]
    assert os.uname().nodename not in output.read_text()
    assert re.fullmatch(r"[0-9a-f]{12}|unknown", origin["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", origin["date"])
    return written


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, [])) for name in BENCHMARKS])
def test_a_benchmark_ends_with_its_line(name: str, tmp_path: Path) -> None:
    if name == "push" and not EXECUTABLE.exists():
        pytest.skip("needs vLLM: make setup-vllm")
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    output = tmp_path / f"{name}.json"
    checked_result(name, run_benchmark(name, output), output)
