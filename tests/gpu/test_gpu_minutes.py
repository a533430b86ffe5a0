"""`make gpu-minutes`: its calls run at tiny size on a CPU, and their results become tables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import gpu
import pytest
import torch
from commands import ROOT, make_forked_python
from slow_kernels import CPU, liger
from transformers.models.qwen2 import modeling_qwen2
from vllm_runs import NEEDS_VLLM, forked_vllm

from rlt_lightning.models.kernels import Kernels
from rlt_lightning.models.lora import LoRA
from rlt_lightning.numerics.attention import KERNELS

Findings = dict[str, dict[str, Any]]
SIDES = ("TRL", "TRL, unpadded attention", "ours")


def run_calls(folder: Path, call: str, **names: str) -> Findings:
    """Run a call of `make gpu-minutes` at tiny size; return what it has found."""
    # Twenty starts of Python would be more than half of the work.
    names = {
        "PYTHON": make_forked_python(folder),
        "CUDA_VISIBLE_DEVICES": "",
        "OUT": str(folder),
        "CALL": call,
    } | names
    done = subprocess.run(
        ["make", "gpu-minutes"],
        cwd=ROOT,
        env=os.environ | {"REHEARSE": "1", "CALL": call} | names,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "results.jsonl").read_text().splitlines()
    found = {finding["check"]: finding for finding in map(json.loads, lines)}
    assert not [finding for finding in found.values() if finding["passed"] is False]
    return found


def test_checks_pass_at_tiny_size(tmp_path: Path) -> None:
    found = run_calls(tmp_path, "check")
    assert {"script, numerics", "script, phases"} <= found.keys()
    assert found["phases, tiny, LoRA, bf16-mixed, checkpointing"]["optimise_s"] > 0


@pytest.mark.full
def test_peers_compute_the_same_at_tiny_size(tmp_path: Path) -> None:
    found = run_calls(tmp_path, "peers")
    assert {"head, 32 to 500, ours", "head, 32 to 500, TRL"} <= found.keys()
    for side in SIDES:
        assert found[f"optimise, miniature, tiny rows 2 shortest 4, {side}"]["seconds"] > 0
    assert found["optimise, miniature, tiny rows 2 shortest 4, TRL"]["gradient_cosine"] > 0.999
    assert found["reward, tiny, tiny"]["largest_difference"] < 1e-4


@pytest.mark.full
@pytest.mark.timeout(1800)  # where many tests share few cores
def test_the_comparison_of_smollm2_ends_at_tiny_size(tmp_path: Path) -> None:
    found = run_calls(tmp_path, "smollm2")
    assert {"t07", "greedy"} <= found["smollm2, rlt_t07, seed 0"].keys()


@NEEDS_VLLM[1]
@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_real_worker_is_met_at_tiny_size(tmp_path: Path) -> None:
    vllm = forked_vllm(tmp_path)
    found = run_calls(tmp_path, "vllm", VLLM=vllm)
    assert found["vllm, push of other weights"]["passed"]
    old, new = found["vllm, push of other weights"]["nats_to_versions"]
    assert new < 1e-3 < old
    assert {"vllm, mismatch", "vllm without float32 logits, mismatch"} <= found.keys()
    turns = run_calls(tmp_path, "turns", VLLM=vllm)["vllm, turns with a killed worker"]
    assert turns["steps"] == 2
    assert " kill " in turns["events"]


def test_a_kit_that_comes_in_parts_is_put_together(tmp_path: Path) -> None:
    sources = {"site": "trl/__init__.py", "vllm": "vllm/entrypoints/cli/main.py"}
    programs = {"site": "", "vllm": "import sys, trl\ndef main(): print('vllm', *sys.argv[1:])\n"}
    for number in (1, 2):
        (tmp_path / "kit" / str(number)).mkdir(parents=True)
    for name, source in sources.items():
        file = tmp_path / name / source
        file.parent.mkdir(parents=True)
        file.write_text(programs[name])
        for folder in [parent for parent in file.parents if tmp_path / name in parent.parents]:
            (folder / "__init__.py").touch()  # else an installed package of this name wins
        with tarfile.open(tmp_path / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(tmp_path / name, ".")
    (tmp_path / "site.tar.xz").rename(tmp_path / "kit" / "1" / "site.tar.xz")
    content = (tmp_path / "vllm.tar.xz").read_bytes()
    store = tmp_path / "a store"
    environment = os.environ | {"KIT": str(tmp_path / "kit"), "STORE": str(store), "OUT": str(tmp_path)}
    environment |= {"REHEARSE": "1", "PYTHON": sys.executable, "PYTHONPATH": "", "CALL": "none"}
    for number, part in ((1, content[:100]), (2, content[100:])):
        (tmp_path / "kit" / str(number) / f"vllm.tar.xz.{number}").write_bytes(part)
        subprocess.run([ROOT / "scripts" / "gpu_minutes.sh"], env=environment, capture_output=True)
        assert (store / "vllm").exists() is (number == 2)
    command = [store / "run_vllm", "serve", "a model"]
    paths = {"PYTHONPATH": str(store / "site")}
    printed = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, check=True)
    assert printed.stdout == "vllm serve a model\n"


def test_results_become_tables(tmp_path: Path) -> None:
    lines = [
        {"check": "phases, 7b, bf16", "passed": None, "why": "skipped: no time left"},
        {"check": "phases, 7b, bf16", "passed": None, "mfu": 0.311, "peak_gib": 1234.5},
        {"check": "vllm, sleep", "passed": False, "why": "OSError: gone"},
    ]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [ROOT / "scripts" / "gpu_minutes.sh", "report", file]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "| phases | mfu | peak_gib |" in printed
    assert "| 7b, bf16 | 0.311 | 1,234 |" in printed
    assert "* vllm, sleep: OSError: gone" in printed
    assert "no time left" not in printed


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
