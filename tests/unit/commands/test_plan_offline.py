"""`rlt plan` of the shipped configs on a machine without a network, hub cache or package cache."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from cases import full
from commands import ROOT, python
from tiny import CONFIGS, OVERLAYS, name_of

from rlt_lightning.commands.plan import Shape, find_folder
from rlt_lightning.models.load import meta_model
from rlt_lightning.types import InputError

# Plans every list of arguments; notes each attempt to reach another machine or to call pip, and stops it.
# Activations are traced once per model and length: tracing them again would show nothing new.
PROGRAM = """
import contextlib, io, json, socket, subprocess, sys, traceback
import huggingface_hub.constants
import rlt_lightning.commands.plan as command
from rlt_lightning.cli.main import run

huggingface_hub.constants.HF_HUB_OFFLINE = False
attempts = []

def refuse(*arguments, **options):
    attempts.append(str(arguments)[:200])
    raise OSError("there is no network")

start = subprocess.run

def refuse_pip(words, *arguments, **options):
    return (refuse if "pip" in words else start)(words, *arguments, **options)

socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse
subprocess.run = refuse_pip
traced, trace = {}, command.trace_activations

def remember(model, *arguments, **options):
    key = str((model.config.to_dict(), model.dtype, arguments, options))
    if key not in traced:
        traced[key] = trace(model, *arguments, **options)
    return traced[key]

command.trace_activations = remember
for arguments in json.loads(sys.stdin.read()):
    page, mistakes = io.StringIO(), io.StringIO()
    sys.argv = ["rlt", "plan", *arguments]
    with contextlib.redirect_stdout(page), contextlib.redirect_stderr(mistakes):
        try:
            status = run()
        except SystemExit as ending:
            status = ending.code
        except Exception:
            status, _ = "a bug", mistakes.write(traceback.format_exc())
    found = {"arguments": arguments, "status": status, "page": page.getvalue()}
    found |= {"mistakes": mistakes.getvalue(), "attempts": list(attempts)}
    sys.__stdout__.write("PLAN " + json.dumps(found) + "\\n")
    attempts.clear()
"""


def planned(commands: list[list[str]], folder: Path | None) -> list[dict]:  # type: ignore[type-arg]
    """Plan each list of arguments in one process, whose caches are empty if there is a folder for them."""
    empty = {"HF_HOME": str(folder / "hub"), "RLT_CACHE_DIR": str(folder / "cache")} if folder else {}
    code = PROGRAM.replace("sys.stdin.read()", repr(json.dumps(commands)))
    found = python(code, ROOT, **empty)
    plans = [json.loads(line[5:]) for line in found.stdout.splitlines() if line.startswith("PLAN ")]
    assert len(plans) == len(commands), found.stderr[-2000:]
    return plans


def launch_line(config: Path) -> list[str]:
    """Return the words of a config's `# Run: rlt VERB …`, from the verb on."""
    [line] = [line for line in config.read_text().splitlines() if line.startswith("# Run: rlt ")]
    return line.split()[3:]


def launches() -> dict[str, tuple[str, list[str]]]:
    """Return verb and options of every config's launch line, without folders of earlier stages."""
    found = {}
    for path in (*CONFIGS, *OVERLAYS):
        verb, *words = launch_line(path)
        if verb == "test":  # an evaluation is not planned
            continue
        pairs = list(zip(words[::2], words[1::2], strict=True))
        kept = [pair for pair in pairs if pair[0] in ("--config", "--trainer.devices")]
        # The model of an earlier stage is not here.
        earlier = ["--model.teacher", "miniature"] * ("teacher: runs/" in path.read_text())
        found[name_of(path)] = verb, [*(word for pair in kept for word in pair), *earlier]
    return found


def check(plan: dict, verb: str = "fit") -> None:  # type: ignore[type-arg]
    """Check that a command printed the plan of its verb, whether or not the run fits, and asked nobody."""
    assert plan["status"] in (0, 1), plan
    assert plan["page"].startswith(f"rlt {verb} on "), plan
    # Only training has gradients, an optimizer and checkpoints.
    parts = ("gradients", "optimizer states", "checkpoint", "train ", "reference")
    assert [part in plan["page"] for part in parts[:3]] == [verb == "fit"] * 3, plan
    assert verb == "fit" or not any(part in plan["page"] for part in parts), plan
    assert plan["attempts"] == [], plan


@pytest.mark.full
def test_released_recipe_is_planned_without_a_network(tmp_path: Path) -> None:
    lines = launches()
    unknown = ["--config=configs/laptop/rlt.yaml", "--model.teacher=somebody/something"]
    plan, refused = planned([lines["hardware/zero3_8gpu"][1], unknown], tmp_path)
    check(plan)
    recipe = " ".join(plan["page"].split())
    assert "limits, for bespokelabs/Bespoke-Stratos-17k" in recipe
    assert refused["status"] == 2
    assert refused["attempts"] == []
    assert "must know the shape of 'somebody/something'" in refused["mistakes"]
    assert len(refused["mistakes"].splitlines()) == 1


@pytest.mark.parametrize(
    ("config", "verb", "phases"),
    [
        ("laptop/generate", "predict", ["start", "generate", "score"]),
        full("laptop/rejection", "predict", ["start", "generate"]),
        full("recipe_7b/score", "predict", ["start", "score"]),
    ],
)
def test_run_without_training_has_no_train_phase(
    config: str, verb: str, phases: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    [plan] = planned([["--config", f"configs/{config}.yaml", f"--plan.json={file}"]], tmp_path)
    check(plan, verb)
    figures = json.loads(file.read_text())
    assert list(figures["phases"]) == phases


@pytest.mark.docs
def test_memory_is_what_ten_measured_runs_needed(smollm2: str, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("plan_benchmark", ROOT / "benchmarks" / "plan.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec.loader.exec_module(benchmark)
    sys.path.remove(str(ROOT / "benchmarks"))
    page = (ROOT / "research" / "speed.md").read_text()
    rows = re.findall(r"^\| `(\w+)`.*\| ([\d.]+) \| ([\d.]+) \| [\d.]+ \|$", page, re.MULTILINE)
    assert {name for name, *_ in rows} == set(benchmark.SETUPS)
    options = {name: [f"--plan.json={tmp_path / name}.json"] for name, *_ in rows}
    planned([[*benchmark.SETUPS[name], *options[name]] for name, *_ in rows], None)
    for name, predicted, measured in rows:
        found = json.loads((tmp_path / f"{name}.json").read_text())["phases"]
        # This process is larger than that of a plan: 0.37 GiB, as the page says.
        sums = {
            phase: parts["total"] / 2**30 - parts["device"]["runtime"] / 2**30 + 0.37
            for phase, parts in found.items()
            if phase != "checkpoint"
        }
        assert max(sums.values()) == pytest.approx(float(measured), rel=0.15), name
        assert max(sums.values()) == pytest.approx(float(predicted), rel=0.06), name


@pytest.mark.full
def test_start_of_the_released_recipe_by_hand(tmp_path: Path) -> None:
    # Teacher, reference and student are of one shape: 7,615,616,512 weights, the largest 152064 x 3584.
    weights, largest, runtime = 7_615_616_512, 152_064 * 3584, 2 * 2**30
    # Rank 32 in all linear layers of 28 blocks: q and o, k and v, and the three of the MLP.
    adapter = 28 * 32 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18_944))
    by_hand = {
        # Shards of 8, in bfloat16, and one tensor whole.
        "zero3": 3 * weights * 2 / 8 + largest * 2,
        # Teacher and reference in fp32, the student in bfloat16.
        "fsdp2": 2 * weights * 4 / 8 + weights * 2 / 8 + largest * 4,
        # Whole; ReferenceSync moves the reference, so it is a copy of the teacher without its adapter.
        "lora": (weights + adapter) * 4 + weights * 4 + weights * 2,
    }
    commands = []
    for name in by_hand:
        words = ["--config", "recipe_7b/rlt", "--config", f"{'add' if name == 'lora' else 'hardware'}/{name}"]
        devices = 1 if name == "lora" else 8
        commands.append([*words, f"--trainer.devices={devices}", f"--plan.json={tmp_path / name}.json"])
    planned(commands, tmp_path)
    for name, size in by_hand.items():
        phases = json.loads((tmp_path / f"{name}.json").read_text())["phases"]
        assert next(iter(phases)) == "start"
        assert phases["start"]["total"] == pytest.approx(size + runtime, rel=1e-12), name


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
def test_every_config_and_overlay_is_planned_without_a_network(part: int, tmp_path: Path) -> None:
    verbs, commands = map(list, zip(*launches().values(), strict=True))
    base = ["--config", "recipe_7b/grpo", "--config"]
    # Overlays that start workers themselves exclude add/vllm, which names workers that run.
    commands.append([*base, "hardware/zero3_8gpu_colocated"])
    for overlay in ("hardware/fsdp2", "hardware/cpu_offload", "add/lora", "add/vllm_async"):
        words = ["add/vllm", "--config", overlay]
        commands.append([*base, *words, "--trainer.devices=8"])
    verbs += ["fit"] * (len(commands) - len(verbs))
    verbs, commands = verbs[part::4], commands[part::4]
    plans = planned(commands, tmp_path)
    assert [plan for plan in plans if plan["status"] not in (0, 1)] == []
    for plan, verb in zip(plans, verbs, strict=True):
        check(plan, verb)


def test_own_rows_are_planned_by_the_limits_of_their_configs(tmp_path: Path) -> None:
    words = [["--config", f"own_rows/{name}", "--plan.device_gib=23.6"] for name in ("explain", "generate")]
    explain, generate, sft = planned([*words, ["--config", "own_rows/sft"]], tmp_path)
    for plan in (explain, generate):
        assert "prompts of up to 4096 tokens (limits" in plan["page"], plan
        assert plan["status"] == 0, plan
    assert "  examples of up to 4096 tokens (limits" in sft["page"]
    assert "prompts" not in sft["page"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [  # as their model cards say
        ("Qwen/Qwen2.5-7B-Instruct", 7.61),
        ("Qwen/Qwen2.5-32B-Instruct", 32.5),
        ("Qwen/Qwen3-0.6B", 0.6),
        ("Qwen/Qwen3-1.7B", 1.7),
        ("smollm2-135m", 0.1345),
    ],
)
def test_known_shapes_have_the_published_sizes(
    name: str, billions: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLT_CACHE_DIR", str(tmp_path / "cache"))
    model = meta_model(str(find_folder(name, tmp_path)))
    assert Shape.from_model(model).weights / 1e9 == pytest.approx(billions, rel=0.015)


def test_every_model_of_the_configs_has_a_known_shape(tmp_path: Path) -> None:
    import yaml

    named = set()
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        settings = (yaml.safe_load(path.read_text()) or {}).get("model", {}).get("init_args", {})
        named |= {settings.get(key) for key in ("teacher", "student", "pretrained")}
    named -= {None, "policy", "reference"}
    for name in named:
        if not name.startswith("runs/"):  # an earlier stage trains it
            assert (find_folder(name, tmp_path) / "config.json").is_file()
    with pytest.raises(InputError, match=r"must know the shape of 'a/b'"):
        find_folder("a/b", tmp_path)
