"""The layout of the package: imports point downwards.

The layers, from low to high; a module may import from its own layer and those below:

    types worker → tags numerics → run → models judging → checkpoints strategies → metrics
    → datamodules tasks engines → rollouts → rewards → modules → callbacks → trainer → teacher → commands
    → cli → __main__ and __init__, which exports what scripts use
"""

from __future__ import annotations

import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest
from commands import ROOT
from imported import PACKAGE, imported, imports, module_name, trees

LAYERS = [
    {"types", "worker"},
    {"tags", "numerics"},
    {"run"},
    {"models", "judging"},
    {"checkpoints", "strategies"},
    {"metrics"},
    {"datamodules", "tasks", "engines"},
    {"rollouts"},
    {"rewards"},
    {"modules"},
    {"callbacks"},
    {"trainer"},
    {"teacher"},
    {"commands"},
    {"cli"},
    {"__main__", "__init__"},
]
# The only files that import these packages, so that a laptop without them runs all the rest.
WRAPPERS = {
    "vllm": {"worker/vllm.py"},
    "trl": set(),  # TRL calls us; only a test and a benchmark import it
    "deepspeed": {"models/weights.py", "strategies/sharding.py", "strategies/zero.py"},
    "wandb": {"trainer.py"},  # asks for the login before a run; Lightning's logger does the rest
}


def folder_of(module: str) -> str:
    """The entry of the package's root that a module lies in."""
    return [*module.split("."), "__init__"][1]


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("rlt_lightning", "torch"),
        ("rlt_lightning.judging.judge", "torch"),
        ("rlt_lightning.worker.ipc", "lightning"),
    ],
)
def test_some_modules_load_little(module: str, absent: str) -> None:
    code = f"import sys, {module}; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_no_import_runs_upwards() -> None:
    level = {name: number for number, names in enumerate(LAYERS) for name in names}
    upwards = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in sorted(others)
        if level[folder_of(other)] > level[folder_of(module)]
    ]
    assert upwards == []


def test_no_modules_import_in_a_circle() -> None:
    assert circle(imports()) == []


def test_only_wrappers_import_heavy_packages() -> None:
    for package, wrappers in WRAPPERS.items():
        found = {
            str(path.relative_to(PACKAGE))
            for path in PACKAGE.rglob("*.py")
            if package in {name.split(".")[0] for name in imported(trees()[module_name(path)])}
        }
        assert found == wrappers, package
