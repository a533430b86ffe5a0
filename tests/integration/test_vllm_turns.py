"""A real vLLM worker on the CPU takes turns with the trainer, as hardware/1gpu_80gb sets it up."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import slow
from commands import path_of_tests, run_rlt
from fits import metrics, small_fit, weights
from turns import turns
from vllm_runs import NEEDS_VLLM, completions, forked_vllm, worker_pids

pytestmark = NEEDS_VLLM

STEPS = 6
KV_CACHE_MIB = 256


def run_in_turns(folder: Path, model: str, *options: str, kills: dict[int, str] | None = None) -> Path:
    """Run six iterations by the overlay for one GPU, with what a CPU lacks taken out; return the run folder.

    The worker gives its memory back while it sleeps, which vLLM's CPU build does not.
    """
    launch = {
        "executable": forked_vllm(folder, "sleeping_vllm"),
        "max_model_len": 512,
        "dtype": "bfloat16",
        "arguments": ["--enforce-eager", "--kv-cache-memory-bytes", str(KV_CACHE_MIB * 2**20)],
    }
    # Two at a time: when the first completion comes, others have still to be sampled.
    # vLLM may leave a call without an answer that comes just when its engine has died.
    arguments = {"max_sequences": 2, "call_timeout_s": 20.0, "launch": launch, "sleep": True}
    arguments["push"] = {"class_path": "rlt_lightning.engines.IPCPush"}  # as by default on a GPU
    watch = {"class_path": "turns.WorkerWatch", "init_args": {"path": str(folder / "events"), "kills": kills}}
    overlay: dict[str, Any] = {
        "trainer": {"accelerator": "cpu", "max_steps": STEPS, "callbacks+": [watch]},
        "rollouts": {
            "sampling": {"max_completion_length": 24},
            "engine": {"class_path": "VLLMEngine", "init_args": arguments},
        },
        "model": {"init_args": {"group_size": 4}},
    }
    (folder / "cpu.yaml").write_text(yaml.safe_dump(overlay))
    words = small_fit(model, folder / "run", "--config=hardware/1gpu_80gb", f"--config={folder / 'cpu.yaml'}")
    result = run_rlt(*words, *options, PYTHONPATH=path_of_tests())
    (folder / "stderr").write_text(result.stderr)
    return folder / "run"


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.parent / "events").open()]


@pytest.fixture(scope="module")
def undisturbed(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_in_turns(tmp_path_factory.mktemp("turns"), tiny_model)


def test_turns_are_verified_after_each_wake_and_give_memory_back(undisturbed: Path) -> None:
    log = (undisturbed / "workers" / "worker-0.log").read_text()
    calls = [line.partition('"')[2] for line in log.splitlines() if '"POST /' in line]
    # Two calls compare log-probs, eight bring completions. What a loaded machine delays is asked again.
    assert re.fullmatch(r"((w+p)+c{10,}s){6}", turns(calls)), turns(calls)
    assert Counter((row["event"], row["asleep"]) for row in events(undisturbed)) == {
        ("verify", False): turns(calls).count("p"),
        ("awake", False): STEPS,
        ("sleep", True): STEPS,
        ("backward", True): STEPS,
    }
    verified = [row["step"] for row in events(undisturbed) if row["event"] == "verify"]
    assert [*dict.fromkeys(verified)] == list(range(STEPS))
    mib = {
        name: [row["mib"] for row in events(undisturbed) if row["event"] == name]
        for name in ("awake", "backward")
    }
    given_back = [awake - asleep for awake, asleep in zip(*mib.values(), strict=True)]
    print(f"figure: resident {mib['awake'][-1]:.0f} MiB awake, {mib['backward'][-1]:.0f} asleep")
    assert min(given_back) > 0.95 * KV_CACHE_MIB
    assert max(mib["backward"]) - min(mib["backward"]) < 0.2 * KV_CACHE_MIB  # nothing piles up
    # vLLM's own sleep on a CPU. Once it frees memory, the worker of these tests need not.
    assert log.count("sleep gave back: vLLM's own 0.0 MiB") == STEPS
    assert {*metrics(undisturbed)} == {*range(1, STEPS + 1)}
    assert worker_pids(undisturbed) == []


@pytest.mark.parametrize("target", ["worker", slow("server"), slow("engine")])
def test_a_worker_killed_in_its_turn_or_out_of_it_changes_nothing(
    target: str, undisturbed: Path, tiny_model: str, tmp_path: Path
) -> None:
    killed = run_in_turns(tmp_path, tiny_model, kills={1: f"asleep {target}", 4: f"awake {target}"})
    kills = [(row["step"], row["asleep"]) for row in events(killed) if row["event"] == "kill"]
    assert kills == [(1, True), (4, False)]
    log = (tmp_path / "stderr").read_text()
    assert log.count("Lost vLLM worker") == 2, log[-4000:]
    assert log.count("starting `vllm serve") == 3
    assert completions(killed) == completions(undisturbed)  # none is lost, none is there twice
    assert len(set(completions(killed))) == STEPS * 2 * 4
    assert metrics(killed) == metrics(undisturbed)
    ours, theirs = weights(killed), weights(undisturbed)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    assert all(row["asleep"] for row in events(killed) if row["event"] == "backward")
    assert worker_pids(killed) == []
