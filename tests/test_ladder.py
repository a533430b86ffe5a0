"""The GPU ladder: its steps run at tiny size on a CPU, its scripts refuse what they cannot do."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import gpu
import pytest
import torch
from commands import ROOT, ForksWithAGPU, make_forked_python
from slow_kernels import CPU, AnyType, SlowFlashAttn, install, liger
from transformers.models.qwen2 import modeling_qwen2

from rlt_lightning.models.kernels import Kernels, use_liger
from rlt_lightning.numerics.attention import KERNELS
from rlt_lightning.numerics.varlen import TorchKernel

LADDER = ROOT / "benchmarks" / "ladder"
STEPS = {"1 versions", "2 numerics", "7 profile", "8 kernels", "8 pinned buffers", "9 engine"}
STEPS |= {"6 tests that need a GPU"}
FITS = {"fp32_cpu", "fp32", "options", "lora", "fsdp2", "ddp", "zero3", "zero1", "offload"}


def script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script of scripts/ with this Python."""
    names = os.environ | {"PYTHON": sys.executable} | environment
    command = [str(ROOT / "scripts" / name), *arguments]
    return subprocess.run(command, cwd=ROOT, env=names, capture_output=True, text=True)


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that makes the table."""
    monkeypatch.syspath_prepend(str(LADDER))
    return importlib.import_module("table")


def test_the_table_says_what_failed_and_what_was_skipped(ladder: ModuleType) -> None:
    findings = [
        {"check": "a|b", "passed": True, "seconds": 3},
        {"check": "rate", "passed": None, "tflops": 812.345, "kinds": {"attention": 1}},
        {"check": "Liger", "passed": None, "why": "skipped: not installed"},
        {"check": "KL", "passed": False, "why": "an | error"},
    ]
    assert ladder.table(findings).splitlines()[2:] == [
        "| a/b | passed | seconds 3 |",
        "| rate | measured | tflops 812 |",
        "| Liger | skipped | why skipped: not installed |",
        "| KL | **failed** | why an / error |",
    ]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The module of step 8, at tiny size on the CPU."""
    for name, value in (("REHEARSE", "1"), ("OUT", str(tmp_path)), ("CUDA_VISIBLE_DEVICES", "")):
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(LADDER))
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", modeling_qwen2.apply_rotary_pos_emb)
    own = ("common", "kernel_times", "numerics")
    before = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    yield importlib.import_module("kernel_times")
    for name in own:
        del sys.modules[name]
    sys.modules.update(before)


def test_the_gpu_benchmark_computes_with_the_kernels_of_a_run(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = gpu.SHAPES["tiny"], 256, True, CPU
    plain = gpu.Group(*shape)
    assert plain.kernels == {"attention": KERNELS["cpu"].name, "blocks": [], "compiled_head": False}
    assert plain.head.compiled is False  # decided, not None
    plain.optimise()
    liger(monkeypatch)
    fused = gpu.Group(*shape, Kernels(liger=True))
    [what] = fused.kernels["blocks"]
    assert what.startswith("RMSNorm, RoPE and SwiGLU by Liger")
    for model in (fused.policy, fused.reference):
        assert "forward" in model.model.norm.__dict__
    fused.optimise()
    pairs = zip(fused.policy.parameters(), plain.policy.parameters(), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_fused_blocks_are_compared_with_plain_ones(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = kernels.BlockCase("tiny")
    case.plain = case.results()
    liger(monkeypatch)
    passed, errors = case.fused("by Liger", kernels.use_checked_liger)
    assert passed, errors
    liger(monkeypatch, error=0.05)
    passed, errors = case.fused("by Liger", use_liger)  # without the check of its functions
    assert not passed
    assert errors["gradients"] > errors["bound"]
    torch.testing.assert_close(case.results(), case.plain)  # it was undone


@pytest.mark.parametrize("error", [0.0, 0.3])
def test_only_an_attention_kernel_that_is_right_is_timed(
    error: float, kernels: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "flash_attn")
    slow = AnyType(SlowFlashAttn(error), "slow")
    chosen = {"flash_attn": slow, "torch": TorchKernel()}  # TorchKernel leaves fp32 to the loop
    monkeypatch.setattr(kernels, "attention_kernel", chosen.__getitem__)
    for device in ("cpu", "cuda"):
        monkeypatch.setitem(KERNELS, device, KERNELS[device])
    noted: dict[str, Any] = {}
    timed: list[str] = []

    def time_once(label: str, step: Any, flops: float) -> None:
        step()
        timed.append(label)

    def note(check: str, passed: bool | None = None, **fields: Any) -> None:
        noted[check] = passed, fields.get("why", "")

    case = kernels.AttentionCase(4, 2, 8)
    for name, value in (("ON_CPU", False), ("timed", time_once), ("note", note)):
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(sys.modules["common"], "note", note)  # of attempt
    case.ours()
    name = "attention 4/2 x 8, ours by"
    assert noted[f"{name} flash_attn, against float64, two families and a loner"][0] is (error == 0.0)
    passed, why = noted[f"{name} fa3"]
    assert passed is None
    assert why.startswith("skipped: FlashAttention-3")
    assert (f"{name} flash_attn, 64 sequences" in timed) is (error == 0.0)
    assert f"{name} torch, 64 sequences" in timed
    assert not any("fa3" in label for label in timed)


def test_runs_whose_first_steps_differ_are_noticed(ladder: ModuleType) -> None:
    compare = importlib.import_module("compare")
    rows = [{"reward/mean": "-2.0", "policy/entropy": "1"}, {"reward/mean": "-2.1", "policy/entropy": "1"}]
    assert compare.largest_error(rows) == pytest.approx(0.05)
    with pytest.raises(SystemExit, match="nothing to compare"):
        compare.largest_error([{"reward/mean": "1"}, {}])


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("gpu_ladder.sh", ["11"], "STEP must be 1 to 10, but is 11."),
        ("gpu_kit.sh", ["unused", "cores"], "GROUP must be core, kernels or plots, but is cores."),
        ("gpu_kit.sh", [], "FOLDER is missing"),
    ],
)
def test_a_script_refuses_what_it_does_not_know(name: str, arguments: list[str], message: str) -> None:
    done = script(name, *arguments)
    assert done.returncode != 0
    assert message in done.stderr


def test_a_pretended_gpu_has_not_all_steps() -> None:
    done = script("gpu_ladder.sh", "3", PRETEND="1")
    assert done.returncode == 2
    assert "With PRETEND, STEP must be 2 or 4 to 9, but is 3." in done.stderr


@pytest.mark.full
def test_a_kit_has_the_versions_of_the_project(tmp_path: Path) -> None:
    done = script("gpu_kit.sh", str(tmp_path / "kit"), DRY="1", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    constraints = (ROOT / "constraints.txt").read_text().split()
    [lightning] = [pin for pin in constraints if pin.startswith("lightning==")]
    assert f" {lightning} " in done.stdout
    assert not (tmp_path / "kit").exists()


@pytest.mark.full
def test_the_ladder_passes_at_tiny_size(tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = {
        "REHEARSE": "1",
        "OUT": str(out),
        "WORK": str(tmp_path / "work"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    # Twenty starts of Python would be more than half of the work.
    names = os.environ | {"PYTHON": make_forked_python(tmp_path)} | environment
    done = subprocess.run(["make", "gpu-ladder"], cwd=ROOT, env=names, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((out / "ladder.json").read_text())
    assert written["failed"] == []
    outcomes = {check["check"]: check["passed"] for check in written["checks"]}
    assert {name for name, passed in outcomes.items() if passed} >= STEPS | {f"fit, {name}" for name in FITS}
    assert "figures of gpu_0.5b" in outcomes
    skipped = {check["check"]: check for check in written["checks"] if "skipped" in check.get("why", "")}
    assert all(check["passed"] is None for check in skipped.values())
    for kernel in ("fa3", "flash_attn", "torch"):
        assert f"attention 4/2 x 64, ours by {kernel}" in skipped
    assert "2 blocks of tiny, by Liger" in skipped
    assert "pinned memory" in skipped
    passed = {"AdamW, tiny, fused against plain", "a push by gloo through buffers"}
    passed |= {f"buffers, {types}" for types in ("float32 as bfloat16", "float32 as float32")}
    if shutil.which("gcc"):
        passed |= {"2 blocks of tiny, compiled against plain"}
    assert {name for name in passed if outcomes.get(name)} == passed
    assert {"HFEngine, tiny, 2 sequences", "transformers' generate, tiny, 2 sequences"} <= outcomes.keys()
    assert "benchmark, generate" not in outcomes
    assert {path.name for path in out.iterdir()} == {"ladder.md", "ladder.json", "ladder.tar.gz"}
    rows = (out / "ladder.md").read_text().splitlines()[2:]
    assert len(rows) == len(written["checks"])


@pytest.mark.slow
def test_the_ladder_passes_on_a_pretended_gpu(pretended_gpus: None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = {"PRETEND": "1", "OUT": str(out), "WORK": str(tmp_path / "work")}
    names = os.environ | {"PYTHON": make_forked_python(tmp_path, ForksWithAGPU)} | environment
    done = subprocess.run(["make", "gpu-ladder"], cwd=ROOT, env=names, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(out.iterdir())) <= 8  # easy to bring home
    written = json.loads((out / "ladder.json").read_text())
    passed = {check["check"] for check in written["checks"] if check["passed"]}
    assert passed >= STEPS - {"1 versions"} | {f"fit, {name}" for name in {*FITS, "bf16"}}
    assert passed >= {"log-probs under autocast", "attention 4/2 x 64, ours by torch"}  # only where a GPU is
