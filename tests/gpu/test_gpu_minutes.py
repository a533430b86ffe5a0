"""`make gpu-minutes`: its calls run at tiny size on a CPU, and the report names missed predictions."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import gpu
import pytest
import torch
from commands import ROOT, make_forked_python
from slow_kernels import CPU, liger
from transformers.models.qwen2 import modeling_qwen2

from rlt_lightning.models.kernels import Kernels
from rlt_lightning.models.lora import LoRA
from rlt_lightning.numerics.attention import KERNELS

FITS = {"quickstart", "fp32_cpu", "fp32", "offloading", "lora", "fsdp2", "zero3", "smollm2_warmup", "smollm2"}
PASSED = {"imports", "versions", "numerics", "pinned", "rates", "engine", "profile"}
PASSED |= {"first step in fp32, CPU and GPU", "a push by gloo through buffers"}
MEASURED = {
    "ceilings",
    "curve, quickstart",
    "curve, smollm2",
    "engine, tiny, 4 rows",
    "head 96, ours",
    "profile, tiny",
}
MEASURED |= {f"phases, tiny LoRA, {options}" for options in ("bf16, checkpointing", "bf16-mixed, Liger")}
MEASURED |= {f"attention 4/2 x 64, shared prefix, {how}" for how in ("ours", "FlexAttention")}


@pytest.fixture
def minutes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module that makes the report."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu_minutes"))
    return importlib.import_module("report")


def test_a_figure_below_its_prediction_is_named(minutes: ModuleType, tmp_path: Path) -> None:
    small = "phases, qwen2.5-0.5b, bf16"
    phase = {"optimise_s": 0.3, "score_s": 0.08, "score_mfu": 0.4, "peak_gib": 12.0}
    lines = [
        {"check": "ceilings", "tflops": 798.0, "copy_gb_s": 3000.0},
        {"check": f"{small}, Liger", "mfu": 0.31} | phase,
        {"check": f"{small}, checkpointing", "mfu": 0.22} | phase,
        {"check": "engine, qwen2.5-0.5b, 64 rows", "tokens_per_s": 2900.0},
        {"check": "engine, qwen2.5-0.5b, 64 rows", "why": "skipped: no time left"},
        {"check": "engine, qwen2.5-0.5b, 256 rows", "tokens_per_s": 12500.0},
        {"check": "fit, zero3", "passed": False, "s": 9, "why": "an | error"},
        {"check": "curve, quickstart", "steps": 4, "reward": [-2.0, -1.5, -1.0, -0.5]},
        {
            "check": "profile, 7b",
            "seconds": 1.0,
            "gpu_ms_by_kind": {"attention": 1, "copies": 3},
            "calls": {},
        },
    ]
    file = tmp_path / "results.jsonl"
    text = "".join(json.dumps({"passed": None} | line) + "\n" for line in lines) + '{"check": "cut sh'
    file.write_text(text)
    report = minutes.report(minutes.read_findings(file))
    assert "| qwen2.5-0.5b, bf16, Liger | 0.3 | 31 %, 25 % | 0.08 | 40 % | 12 |" in report
    assert "| fit, zero3 | **failed** | 9 | an / error |" in report
    assert "| quickstart | 4 | reward -2 → -0.5 |" in report
    assert "| 7b | 1,000 | 4 | 25 % | 75 % |" in report
    short = report.split("### What fell short")[1]
    assert f"* {small}, Liger: mfu 0.31, predicted 0.33." in short
    assert "* engine, qwen2.5-0.5b, 64 rows: tokens_per_s 2,900, predicted 3,000." in short
    assert "qwen2.5-1.5b, bf16, Liger: not measured (not reached)" in short
    assert f"{small}, checkpointing" not in short
    assert "256 rows" not in short


def test_the_gpu_benchmark_computes_with_the_kernels_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", modeling_qwen2.apply_rotary_pos_emb)
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


def test_the_gpu_benchmark_trains_only_an_adapter() -> None:
    group = gpu.Group(gpu.SHAPES["tiny"], 256, True, CPU, lora=LoRA(rank=2))
    group.optimise()
    with_gradient = {name.split(".")[-3] for name, p in group.policy.named_parameters() if p.grad is not None}
    assert with_gradient == {"lora_A", "lora_B"}
    whole = gpu.Group(gpu.SHAPES["tiny"], 256, True, CPU)
    assert group.optimise_flops() < whole.optimise_flops()


def test_runs_whose_first_steps_differ_are_noticed(minutes: ModuleType) -> None:
    curves = importlib.import_module("curves")
    rows = [{"reward/mean": "-2.0", "policy/entropy": "1"}, {"reward/mean": "-2.1", "policy/entropy": "1"}]
    assert curves.largest_error(rows) == pytest.approx(0.05)
    with pytest.raises(SystemExit, match="nothing to compare"):
        curves.largest_error([{"reward/mean": "1"}, {}])


def test_an_unknown_call_is_refused() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_minutes.sh", "3"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert (
        "must be kit, 0, 1, 2, all, own, science, rates, engine, profile or report, but is 3." in done.stderr
    )


def test_both_calls_pass_at_tiny_size(tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Twenty starts of Python would be more than half of the work.
    names = os.environ | {"PYTHON": make_forked_python(tmp_path), "REHEARSE": "1", "CUDA_VISIBLE_DEVICES": ""}
    names |= {"OUT": str(out), "STORE": str(tmp_path / "store"), "KIT": str(tmp_path / "no kit")}
    done = subprocess.run(["make", "gpu-minutes"], cwd=ROOT, env=names, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    passed = {finding["check"] for finding in findings if finding["passed"]}
    measured = {f["check"] for f in findings if f["passed"] is None and "why" not in f}
    assert not [finding for finding in findings if finding["passed"] is False]
    assert passed >= PASSED | {f"fit, {name}" for name in FITS}
    assert measured >= MEASURED
    assert {path.name for path in out.iterdir()} == {"results.jsonl", "logs.tgz", "profiles.txt"}
    report = done.stdout.split("\n### ", 1)[1]
    assert "| tiny LoRA, bf16, checkpointing |" in report
    assert "phases, 7b LoRA, bf16-mixed, Liger, checkpointing: not measured" in report


def run_call(call: str, tmp_path: Path, **names: str) -> list[dict[str, Any]]:
    """Run a call at tiny size in folders of its own; return what it has found."""
    folders = {
        "OUT": str(tmp_path / "out"),
        "STORE": str(tmp_path / "store"),
        "KIT": str(tmp_path / "no kit"),
    }
    names = os.environ | {"REHEARSE": "1", "CUDA_VISIBLE_DEVICES": ""} | folders | names
    command = [ROOT / "scripts" / "gpu_minutes.sh", call]
    done = subprocess.run(command, cwd=ROOT, env=names, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]


def test_phases_of_a_card_are_measured_beside_the_plan(minutes: ModuleType, tmp_path: Path) -> None:
    findings = run_call("own", tmp_path)
    [found] = [finding for finding in findings if finding["check"] == "own, tiny"]
    assert found["passed"]
    assert found["steps"] == len(found["update_s"]) == 2
    assert {"start", "generate", "score", "train", "step"} <= found["planned_gib"].keys()
    assert found["perf/generate_tokens_per_s"] * found["perf/generate_s"] == pytest.approx(2 * 4 * 8)
    assert "| tiny | " in minutes.report(findings)


def test_seeds_side_by_side_share_a_folder(minutes: ModuleType, tmp_path: Path) -> None:
    findings = run_call("science", tmp_path, PARTS="finding", SEEDS="0 3")
    arms = {finding["check"]: finding for finding in findings if finding["check"].startswith("finding, ")}
    for arm in ("warmup", "best_of_4", "rlt"):
        assert arms[f"finding, {arm}"]["seeds"] == [0, 3]
        assert len(arms[f"finding, {arm}"]["greedy"]) == 2
    stages = json.loads((tmp_path / "out" / "finding.json").read_text())["arms"]
    assert stages.keys() == {"warmup", "best_of_4", "rlt"}
    times = (tmp_path / "store/runs/science/finding/times.jsonl").read_text()
    assert times.count('"stage": "warmup"') == 1  # which all processes share
    assert "| rlt | 0, 3 |" in minutes.report(findings)
