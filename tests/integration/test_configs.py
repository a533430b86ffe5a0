"""Every shipped YAML is parsed, and its model, data and callbacks are built and run at tiny size."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import ROOT, run_rlt
from fake_worker import worker_of
from tiny import CONFIGS, OVERLAYS, name_of, tiny_run, uses_workers, written_file

from rlt_lightning.engines import Launch
from rlt_lightning.run.shipped import find_config, list_shipped_configs


def read_config(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load(find_config(name).read_text())
    return settings


EIGHT_GPUS = ("fsdp2_8gpu", "zero1_8gpu", "zero3_8gpu", "zero3_8gpu_async", "zero3_8gpu_colocated")
PLAIN_WORKERS = ("generate_8gpu", "evaluate_8gpu")


@pytest.mark.parametrize("name", [*EIGHT_GPUS, *PLAIN_WORKERS])
def test_eight_gpus_are_shared_out(name: str) -> None:
    overlay = read_config(f"hardware/{name}")
    engine = overlay["rollouts"]["engine"]["init_args"]
    workers = Launch(**engine["launch"])  # as many lists of GPUs as workers
    devices = overlay["trainer"].get("devices", 0)  # an evaluation with workers needs none of its own
    trains, samples = (
        range(devices) if isinstance(devices, int) else devices,
        [g for [g] in workers.gpus or []],
    )
    assert sorted({*trains, *samples}) == list(range(8))
    together = engine.get("sleep", False)
    assert together == bool(set(trains) & set(samples)) == ("--enable-sleep-mode" in workers.arguments)


def test_where_sampler_and_trainer_differ_tokens_are_weighed() -> None:
    weights = {
        "class_path": "rlt_lightning.numerics.TruncatedImportanceSampling",
        "init_args": {"level": "token", "cap": 2.0},
    }
    for path in [*CONFIGS, *OVERLAYS]:
        settings = yaml.safe_load(path.read_text())
        options = settings.get("model", {}).get("init_args", {})
        if settings.get("rollouts", {}).get("asynchronous"):
            assert options["importance_sampling"] == weights, path
        elif name_of(path) == "add/faithful":
            assert options["importance_sampling"] is None  # as released
        else:
            assert "importance_sampling" not in options, path  # the default chooses by the engine


def test_every_config_is_found_by_its_name() -> None:
    assert list_shipped_configs() == {name_of(path): path for path in (*CONFIGS, *OVERLAYS)}
    assert {*list_shipped_configs().values()} == {*(ROOT / "configs").rglob("*.*")}
    assert find_config("add/vllm") == ROOT / "configs" / "add" / "vllm.yaml"


def test_a_file_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("laptop/rlt").mkdir(parents=True)
    assert find_config("laptop/rlt") == ROOT / "configs" / "laptop" / "rlt.yaml"
    Path("laptop/opd").touch()
    assert find_config("laptop/opd") == Path("laptop/opd")


# Of modules and engines those whose config no other test runs; tests/integration/test_vllm_worker.py has the
# overlay that launches.
EACH_KIND = ["recipe_7b/grpo", "recipe_7b/sft", "add/vllm_async", "hardware/generate_8gpu", "add/lora"]
TO_RUN = [
    pytest.param(path, marks=[] if name_of(path) in EACH_KIND else pytest.mark.full, id=name_of(path))
    for path in (*CONFIGS, *OVERLAYS)
    if path.stem != "vllm_launch"
]


@pytest.mark.parametrize("config", TO_RUN)
def test_a_shipped_config_builds_and_runs_at_tiny_size(config: Path, tiny_model: str, tmp_path: Path) -> None:
    verb, options, settings = tiny_run(config, tiny_model)
    options += [f"--output_dir={tmp_path / 'run'}"]
    plain = config.stem in PLAIN_WORKERS
    with worker_of(tiny_model, dev_mode=not plain) if uses_workers(config) else nullcontext() as worker:
        if worker is not None:
            launches = "launch:" in config.read_text()
            options += ["--rollouts.engine.init_args.launch=null"] if launches else []
            options += [f"--rollouts.engine.init_args.urls=[{worker.url}]"]
            options += [] if plain else ["--rollouts.engine.init_args.push=rlt_lightning.engines.IPCPush"]
        run_rlt(verb, *options)
    resolved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert resolved["model"]["class_path"] == settings["model"]["class_path"]
    assert (tmp_path / "run" / written_file(verb, settings)).stat().st_size > 0


def test_the_released_recipes_figures_are_in_the_configs() -> None:
    rlt = read_config("recipe_7b/rlt")
    model, data = rlt["model"]["init_args"], rlt["data"]["init_args"]
    sampling = rlt["rollouts"]["sampling"]
    assert (rlt["trainer"]["max_steps"], data["prompts_per_step"], model["group_size"]) == (125, 16, 64)
    assert sampling == {"temperature": 0.7, "max_completion_length": 16384}
    assert model["optimizer"] == {"lr": 1e-6, "scheduler": "constant"}
    assert model["policy_loss"]["init_args"]["kl_coef"] == 0.04
    sft = read_config("recipe_7b/warmup")
    assert (sft["trainer"]["max_epochs"], sft["data"]["init_args"]["prompts_per_step"]) == (10, 16)
    assert sft["model"]["init_args"]["optimizer"] == {
        "lr": 1e-5,
        "weight_decay": 1e-4,
        "betas": [0.9, 0.95],
        "scheduler": "cosine",
        "warmup_frac": 0.05,
    }


def test_both_faithful_overlays_have_the_same_prompts() -> None:
    sft, rl = (read_config(f"add/{name}")["data"]["init_args"] for name in ("faithful_sft", "faithful"))
    assert sft.pop("long_traces") == "truncate"
    assert sft == rl
    assert len({*rl.values()}) == 2
    assert all(r"'\n\n'" in prompt for prompt in rl.values())  # the letters, not line breaks


def test_traditional_rl_has_the_papers_rewards_and_stage_2s_figures() -> None:
    stage_2, traditional = read_config("recipe_7b/rlt"), read_config("recipe_7b/grpo")
    reward = traditional["model"]["init_args"]["reward"]
    assert reward["init_args"] == {"right": 1.0, "wrong": -0.5, "unformatted": -1.0}
    assert traditional["trainer"] == stage_2["trainer"]
    assert traditional["rollouts"] == stage_2["rollouts"]
    for name in ("group_size", "policy_loss", "optimizer", "gradient_checkpointing"):
        assert traditional["model"]["init_args"][name] == stage_2["model"]["init_args"][name]
