"""The layout of the package: imports point downwards, and public paths can be imported.

The layers, from low to high; a module may import from its own layer and those below:

    types gloo ipc version allocator → tags numerics → models judging → checkpoints strategies → run → metrics
    → datamodules tasks engines → rollouts → rewards → modules → callbacks → trainer → teacher → commands
    → cli → __main__ and __init__, which exports what scripts use
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest
from commands import ROOT
from imported import PACKAGE, imported, imports, module_name, trees

LAYERS = [
    {"types", "gloo", "ipc", "version", "allocator", "console", "digests"},
    {"tags", "numerics"},
    {"models", "judging"},
    {"checkpoints", "strategies"},
    {"run"},
    {"metrics"},
    {"datamodules", "tasks", "engines", "vllm_worker"},
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
    "vllm": {"vllm_worker.py"},
    "trl": set(),  # TRL calls us; only a test and a benchmark import it
    "deepspeed": {"models/weights.py", "strategies/sharding.py", "strategies/zero.py"},
    "wandb": set(),  # by Lightning's logger
}
# Paths that users import, whether or not a page names them.
PUBLIC = (
    "rlt_lightning.callbacks.RolloutCallback",
    "rlt_lightning.datamodules.StratosDataModule",
    "rlt_lightning.engines.VLLMEngine",
    "rlt_lightning.modules.RLTModule",
    "rlt_lightning.numerics.rewards.student_solution_reward",
    "rlt_lightning.models.load.load_tokenizer",
    "rlt_lightning.strategies.DeepSpeed",
    "rlt_lightning.strategies.FSDP2",
    "rlt_lightning.StratosDataModule",
    "rlt_lightning.TeacherRLData",
    "rlt_lightning.Trainer",
    "rlt_lightning.types.Rollout",
    "rlt_lightning.vllm_worker.WorkerExtension",
)


def folder_of(module: str) -> str:
    """The entry of the package's root that a module lies in."""
    return [*module.split("."), "__init__"][1]


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@cache
def named_paths() -> set[str]:
    """Dotted paths of the package in pages, configs, examples and benchmarks, with what is imported there."""
    files = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "research").glob("*.md"),
    ]
    files += [*(ROOT / "configs").rglob("*.yaml")]
    files += [
        path for folder in ("examples", "benchmarks", "research") for path in (ROOT / folder).rglob("*.py")
    ]
    paths = set(PUBLIC)
    for file in files:
        text = file.read_text()
        paths |= set(
            re.findall(r"(?<!entry-points\.\")\brlt_lightning(?:\.(?!md\b)[A-Za-z_]\w*)+\b(?!/)", text)
        )
        for module, names in re.findall(r"from (rlt_lightning[\w.]*) import (\([^)]*\)|[^\n(;]+)", text):
            words = re.sub(r"#[^\n]*|[()\\]", "", names).split(",")
            paths |= {f"{module}.{word.split()[0]}" for word in words if word.strip() not in ("", "*")}
    return paths


def is_importable(path: str) -> bool:
    """Whether a path is a module or leads to an attribute of one; the vLLM worker's module is only parsed."""
    module = path
    while module not in trees():
        module = module.rpartition(".")[0]
    names = path.removeprefix(module).split(".")[1:]
    if module == "rlt_lightning.vllm_worker":
        defined = {getattr(node, "name", None) for node in trees()[module].body}
        return set(names) <= defined
    value = importlib.import_module(module)
    for name in names:
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def test_every_public_path_imports() -> None:
    paths = named_paths()
    assert len(paths) > 50
    assert [path for path in sorted(paths) if not is_importable(path)] == []


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("rlt_lightning", "torch"),
        ("rlt_lightning.judging.judge", "torch"),
        ("rlt_lightning.ipc", "lightning"),
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
