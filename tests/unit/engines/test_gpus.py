"""What samples where no engine is set, and which GPUs workers get: counted among those that are visible."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_worker import fake_vllm

from rlt_lightning.engines import HFEngine, Launch, VLLMEngine
from rlt_lightning.engines.choice import choose_engine
from rlt_lightning.engines.launch import choose_worker_gpus, start_server, stop_server
from rlt_lightning.run.allocator import ALLOCATOR, grow_segments
from rlt_lightning.types import InputError

UUID = "GPU-1f8d4b1c-0f0a-4b6e-9c52-8d6a3f1f7a10"


@pytest.mark.parametrize(
    ("shown", "gpus", "given"), [(None, [4], "4"), ("4,5,6,7", [3, 2], "7,6"), (f"MIG-a, {UUID}", [1], UUID)]
)
def test_gpus_are_counted_among_the_visible_ones(shown: str | None, gpus: list[int], given: str) -> None:
    environment = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert choose_worker_gpus(gpus, environment) == given


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert choose_worker_gpus([1], {}) == "1"
    with pytest.raises(InputError, match=r"launch\.gpus must count, from 0, among the 2 GPUs"):
        choose_worker_gpus([2], {})


def test_a_launched_worker_sees_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"5,{UUID},7")
    launch = Launch(executable=fake_vllm(tmp_path), num_workers=2, gpus=[[1], [2]])
    told = [launch.build_gpu_environment(i) for i in range(2)]
    assert told == [{"CUDA_VISIBLE_DEVICES": UUID}, {"CUDA_VISIBLE_DEVICES": "7"}]


def test_the_allocator_is_set_before_torch_is_imported() -> None:
    program = """
import os, sys
from rlt_lightning.__main__ import main

class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            print({name: value for name, value in os.environ.items() if "ALLOC_CONF" in name})
            sys.exit(0)

assert "torch" not in sys.modules
sys.meta_path.insert(0, Watch())
sys.argv = ["rlt", "report"]
main()
"""
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "{'PYTORCH_ALLOC_CONF': 'expandable_segments:True'}\n", done.stderr


@pytest.mark.parametrize(("cuda", "backend", "told"), [(True, "rlt", 1), (False, "rlt", 0), (True, None, 0)])
def test_trained_workers_on_gpus_keep_float32_logits(
    cuda: bool, backend: str | None, told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    launch = Launch(executable=fake_vllm(tmp_path), arguments=["--hf-overrides", "{}"])
    command = launch.build_command(0, 8000, "model", backend, "teacher")
    assert command.count('{"head_dtype": "float32"}') == told
    assert command[-1] == "{}"  # the last one counts: it can be taken back


def run_worker(program: str, environment: dict[str, str], folder: Path) -> str:
    """Return the line that a launched worker prints."""
    process = start_server([sys.executable, "-c", program], environment, folder / "log")
    process.wait(60)
    stop_server(process)
    return (folder / "log").read_text().splitlines()[-2]  # the guard's line follows


def test_only_the_trainers_allocator_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[str, str] = {}
    grow_segments(chosen)
    assert chosen == {ALLOCATOR: "expandable_segments:True"}
    for name in (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"):
        own = {name: "max_split_size_mb:512"}
        grow_segments(own)
        assert own == {name: "max_split_size_mb:512"}
        monkeypatch.setenv(name, "expandable_segments:True")
    program = 'import os; print([v for n, v in os.environ.items() if "ALLOC_CONF" in n])'
    told = [run_worker(program, own, tmp_path) for own in ({}, {ALLOCATOR: "max_split_size_mb:512"})]
    assert told == ["[]", "['max_split_size_mb:512']"]


def test_a_launched_worker_needs_no_flashinfer_unless_asked(tmp_path: Path) -> None:
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    program = f"import os; print(os.environ[{name!r}])"
    told = [run_worker(program, own, tmp_path) for own in ({}, {name: "1"})]
    assert told == ["0", "1"]


MODEL = "Qwen/Qwen2.5-1.5B-Instruct"


@pytest.mark.parametrize(
    ("gpus", "model", "pushes", "installed", "workers"),
    [
        ([], MODEL, True, True, None),  # a CPU
        ([0], "miniature-teacher", True, True, None),  # a worker starts slower than it samples
        ([0], MODEL, True, False, None),
        ([0], MODEL, True, True, [[0]]),
        ([2, 3], MODEL, True, True, [[2], [3]]),
        ([0], MODEL, False, True, [[0]]),  # an evaluation
        ([0, 1], MODEL, False, True, None),
    ],
)
def test_gpus_with_vllm_sample_with_it(
    gpus: list[int], model: str, pushes: bool, installed: bool, workers: Any
) -> None:
    engine, reason = choose_engine(gpus, model, pushes, installed)
    assert (reason is None) is (not gpus or model != MODEL)
    if workers is None:
        assert isinstance(engine, HFEngine)
        assert ("rlt-lightning[vllm]" in str(reason)) is not installed
        return
    assert isinstance(engine, VLLMEngine)
    assert engine.fleet.launch is not None
    assert engine.fleet.launch.gpus == workers
    assert engine.takes_turns is pushes
    assert (engine.push.backend is not None) is pushes
