"""`make gpu-minutes`: its calls run at tiny size on a CPU, and their results become tables."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gpu
import pytest
import torch
from commands import ROOT, make_forked_python, require_success
from packaging.requirements import Requirement
from parsed import check_rlt
from rows_of import read, write
from slow_kernels import CPU, liger
from transformers.models.qwen2 import modeling_qwen2
from vllm_runs import NEEDS_VLLM, forked_vllm

from rlt_lightning.models.kernels import Kernels
from rlt_lightning.models.lora import LoRA
from rlt_lightning.numerics.attention import KERNELS

Findings = dict[str, dict[str, Any]]
MINUTES = ROOT / "benchmarks" / "gpu_minutes"
# What a machine without a network has, as research/gpu.md asks.
MACHINE = "torch triton transformers accelerate lightning peft pandas pyarrow xxhash requests pytest"
SIDES = ("TRL", "TRL, unpadded attention", "ours")


def run_calls(folder: Path, call: str, **names: str) -> Findings:
    """Run a call of `make gpu-minutes` at tiny size; return what it has found."""
    # Twenty starts of Python would be more than half of the work.
    names = {"PYTHON": make_forked_python(folder), "CUDA_VISIBLE_DEVICES": "", "OUT": str(folder)} | names
    environment = os.environ | {"REHEARSE": "1", "CALL": call} | names
    require_success(
        subprocess.run(["make", "gpu-minutes"], cwd=ROOT, env=environment, capture_output=True, text=True)
    )
    found = {finding["check"]: finding for finding in read(folder / "results.jsonl")}
    assert not [finding for finding in found.values() if finding["passed"] is False]
    return found


@pytest.fixture
def import_for_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], ModuleType]:
    """Return a function that imports a script of the calls as on a GPU, where nothing is tiny."""
    monkeypatch.syspath_prepend(MINUTES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("REHEARSE", raising=False)
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("VLLM", sys.executable)
    for name in [file.stem for file in MINUTES.glob("*.py")]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module


def record_commands(monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> list[list[str]]:
    """Let a script's commands end at once; return the list in which they are collected."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=1, stdout="")

    monkeypatch.setattr(script, "subprocess", SimpleNamespace(run=run, PIPE=-1, STDOUT=-2))
    monkeypatch.setattr(script, "make_model", lambda shape: Path(shape))
    monkeypatch.setattr(sys, "argv", [script.__name__, "1000"])
    with pytest.raises(SystemExit):
        script.main()
    return commands


def test_benchmarks_take_the_options_of_peers(
    import_for_gpu: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = import_for_gpu("peers")
    monkeypatch.setattr(peers, "list_heads", dict)
    commands = record_commands(monkeypatch, peers)
    assert len(commands) == len(peers.CASES)

    class ParsedError(Exception):
        pass

    def stop(parser: Any, **_: Any) -> None:
        raise ParsedError(parser.parse_args())

    for command in commands:
        benchmark = importlib.import_module(Path(command[1]).stem)
        monkeypatch.setattr(benchmark, "read_options", stop)
        monkeypatch.setattr(sys, "argv", command[1:])
        with pytest.raises(ParsedError):
            benchmark.main()


def test_rlt_takes_the_commands_of_turns_and_smollm2(
    import_for_gpu: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    [turns] = record_commands(monkeypatch, import_for_gpu("vllm_turns"))
    check_rlt(turns[3:], tmp_path)

    smollm2 = import_for_gpu("smollm2")
    commands: list[list[str]] = []

    def run(words: list[str], log: Path) -> None:
        folder = log.with_suffix("")
        (folder / "model").mkdir(parents=True)
        for name in ("model/config.json", "README.md"):
            (folder / name).touch()
        for name in ("traces.jsonl", "distillation.jsonl"):
            (folder / name).write_text('{"question": "", "reasoning_trace": ""}\n')
        sets = {"sets": {"word_sums": {"pass_at_1": 0.5}}}
        (folder / "evaluation.json").write_text(json.dumps(sets))
        commands.append(words)

    monkeypatch.setattr(smollm2, "word_sum_kind", lambda question, trace: ("right", ""))
    comparison = smollm2.Comparison(tmp_path / "smollm2")
    monkeypatch.setattr(comparison.stages, "run", run)
    for arm in smollm2.ARMS:
        assert comparison.run(arm, 0) == (None, {"t07": 50.0, "greedy": 50.0})
    kinds = {tuple(word for word in words if word.startswith("-")): words for words in commands}
    for words in kinds.values():
        check_rlt(words, tmp_path)


@NEEDS_VLLM[1]
@pytest.mark.full
def test_vllm_takes_the_arguments_of_its_worker(import_for_gpu: Callable[[str], ModuleType]) -> None:
    worker = import_for_gpu("vllm_worker")
    code = """if True:
        import sys
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        print(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]))
    """
    for settings in (worker.launch(False), worker.launch(True, "--hf-overrides", "{}")):
        words = worker.Launch(**settings).build_command(0, 8000, "model", "ipc", "teacher")[2:]
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
        assert "enable_sleep_mode=True" in done.stdout, done.stderr


def list_requirements(names: list[str]) -> set[str]:
    """Return packages with all that they need, by the metadata of those that are installed."""
    found: set[str] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop().name).lower()
        if name in found:
            continue
        found.add(name)
        try:
            requirements = map(Requirement, metadata.requires(name) or [])
        except metadata.PackageNotFoundError:
            continue
        waiting += [need for need in requirements if not need.marker or need.marker.evaluate({"extra": ""})]
    return found


def test_the_kit_holds_what_its_calls_need() -> None:
    script = (ROOT / "scripts" / "gpu_minutes.sh").read_text()
    ours = re.search(r"^ours=\((.*?)\)", script, re.DOTALL | re.MULTILINE)
    assert ours
    held = {re.sub(r"[-_.]+", "-", Requirement(name).name).lower() for name in ours[1].split()}
    project = ["rlt-lightning", "liger-kernel", "trl", "cut-cross-entropy"]
    assert list_requirements(project) - list_requirements(MACHINE.split()) - held == {"rlt-lightning"}


FAKE_PYTHON = """#!{python}
import os, sys, zipfile
from pathlib import Path
words = sys.argv[1:]
if "download" in words:
    place = words.index("--dest") + 1
    with zipfile.ZipFile(Path(words[place]) / "all.whl", "w") as wheel:
        for name in words[place + 1 :]:
            wheel.writestr(name.partition("==")[0] + "/a.py", "")
        if words[place + 1].startswith("vllm"):
            for name in ("kept.so", "_moe_C_stable_x.so", "vllm_flash_attn/_vllm_fa2_C.so"):
                wheel.writestr("vllm/" + name, "")
elif words[0] == "-c":
    wheel = Path(words[-1]) / "smollm2.whl"
    wheel.write_bytes(b"12")
    print(wheel)
else:
    os.execv("{python}", ["{python}", *words])
"""


def test_a_kit_leaves_out_what_no_call_needs(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON.replace("{python}", sys.executable))
    python.chmod(0o755)
    kit = tmp_path / "a kit"
    environment = os.environ | {"KIT": str(kit), "PYTHON": str(python), "XZ": "-0"}
    subprocess.run([ROOT / "scripts" / "gpu_minutes.sh", "kit"], env=environment, check=True)
    names = {str(file.relative_to(kit)) for file in kit.rglob("*") if file.is_file()}
    parts = [f"{n}/vllm.tar.xz.{n}" for n in (1, 2)]
    assert names == {"1/site.tar.xz", *parts, "3/smollm2.whl.1", "4/smollm2.whl.2"}
    whole = tmp_path / "vllm.tar.xz"
    whole.write_bytes(b"".join((kit / part).read_bytes() for part in parts))
    with tarfile.open(whole) as archive:
        held = archive.getnames()
    assert {"./vllm/kept.so", "./vllm/a.py", "./pydantic/a.py"} <= set(held)
    assert not [name for name in held if "_moe_C" in name or "fa2" in name]


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
    file = write(tmp_path / "results.jsonl", lines)
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
