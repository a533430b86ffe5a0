"""`rlt plan`: figures by hand, what autograd keeps, measured runs, and no network."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cases import full
from commands import ROOT, python, rlt
from families import build
from tiny import CONFIGS, OVERLAYS, name_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from rlt_lightning.commands.plan import SHAPES, Model, list_devices, read_sharding
from rlt_lightning.models.load import load_model, meta_model
from rlt_lightning.models.packed import scored_hidden_states
from rlt_lightning.modules import SFTModule
from rlt_lightning.modules.optimizer import OptimizerConfig
from rlt_lightning.numerics.packing import PackedSequences, ScoredSequence

GIB = 2**30
SEVEN = 7_615_616_512  # weights of Qwen2.5-7B
# Plans every list of arguments; notes each attempt to reach another machine or to call pip, and stops it.
PROGRAM = """
import contextlib, io, json, socket, subprocess, sys, traceback
import huggingface_hub.constants
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
    found = {"status": status, "page": page.getvalue()}
    found |= {"mistakes": mistakes.getvalue(), "attempts": list(attempts)}
    sys.__stdout__.write("PLAN " + json.dumps(found) + "\\n")
    attempts.clear()
"""


def planned(commands: list[list[str]], folder: Path | None = None) -> list[dict[str, Any]]:
    """Plan each list of arguments in one process, whose caches are empty if there is a folder for them."""
    empty = {"HF_HOME": str(folder / "hub"), "RLT_CACHE_DIR": str(folder / "cache")} if folder else {}
    found = python(PROGRAM.replace("sys.stdin.read()", repr(json.dumps(commands))), ROOT, **empty)
    plans = [json.loads(line[5:]) for line in found.stdout.splitlines() if line.startswith("PLAN ")]
    assert len(plans) == len(commands), found.stderr[-2000:]
    return plans


def read_table(page: str) -> dict[str, dict[str, float]]:
    """Return the GiB of each part in each phase; a part that a phase does not hold is left out."""
    lines = page.splitlines()[2:]
    phases = re.split(r"\s{2,}", lines[0])[1:]
    table: dict[str, dict[str, float]] = {phase: {} for phase in phases}
    for line in lines[1 : lines.index("")]:
        part, *cells = re.split(r"\s{2,}", line)
        for phase, cell in zip(phases, cells, strict=True):
            if cell != ".":
                table[phase][part] = float(cell.rstrip("*"))
    return table


def tables(*commands: list[str]) -> list[dict[str, dict[str, float]]]:
    """Plan each list of arguments and return the tables."""
    return [read_table(plan["page"]) for plan in planned(list(commands))]


def near(number: float) -> Any:
    """Return what a cell of the table equals."""
    return pytest.approx(number / GIB, abs=0.0051)


RECIPE = ["--config=recipe_7b/rlt", "--model.teacher=Qwen/Qwen2.5-7B-Instruct"]
OWN = ["--config=own_rows/rlt", "--config=hardware/1gpu_80gb", "--rollouts.engine=HFEngine"]


def test_each_strategy_divides_what_it_shards() -> None:
    # Bytes a weight on 4 processes: weights, gradients, states, workspace of a step; then the buckets.
    expected = {
        "ddp": (4, 4, 8, 4, 4 * SEVEN),
        "fsdp2": (1, 1, 2, 1, 0),
        "deepspeed_stage_1": (2, 4, 3, 2, 4 * 5e8),  # DeepSpeed steps fp32 copies of 2-byte weights
        "deepspeed_stage_2": (2, 1, 3, 2, 2 * 4 * 2e8),
        "deepspeed_stage_3": (0.5, 1, 3, 2, 4 * 2e8),
    }
    workers = ["--rollouts.engine=HFEngine", "--trainer.devices=4"]
    found = tables(*([*RECIPE, *workers, f"--trainer.strategy={name}"] for name in expected))
    names = ("policy weights", "gradients", "optimizer states", "step workspace", "gradient buckets")
    for (strategy, figures), table in zip(expected.items(), found, strict=True):
        sizes = [SEVEN * figure for figure in figures[:4]] + [figures[4]]
        assert [table["step"].get(name, 0.0) for name in names] == [near(size) for size in sizes], strategy


def test_frozen_models_can_wait_in_main_memory() -> None:
    command = [*RECIPE, "--rollouts.engine=HFEngine", "--model.student=Qwen/Qwen2.5-7B-Instruct"]
    here, away = planned([command, [*command, "--model.offload_frozen=true"]])
    # The student in bfloat16, and the reference in fp32.
    assert read_table(here["page"])["train"]["student weights"] == near(2 * SEVEN)
    table = read_table(away["page"])
    # They come back one at a time, so the largest decides.
    assert table["score"]["reference weights"] == near(4 * SEVEN)
    assert {"student weights", "reference weights"} & {*table["train"], *table["step"]} == set()
    assert "student weights" not in table["score"]


def test_an_adapter_costs_its_own_weights() -> None:
    lora = [*OWN, "--config=add/lora", "--model.dtype=bfloat16", "--model.teacher=Qwen/Qwen2.5-7B-Instruct"]
    with_reference, without = tables(lora, [*lora, "--trainer.callbacks=[]"])
    # Rank 32 in all linear layers of 28 blocks: q and o, k and v, and the three of the MLP.
    adapter = 28 * 32 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18_944))
    assert with_reference["train"]["optimizer states"] == near(8 * adapter)
    assert with_reference["step"]["gradients"] == near(4 * adapter)
    # A reference that moves is a copy, without the adapter.
    assert with_reference["train"]["reference weights"] == near(2 * SEVEN)
    assert "reference weights" not in without["train"]


def test_cache_of_the_engine_stores_a_prompt_once() -> None:
    # 64 rows of 1,024 tokens, half of one of 28 layers copied; 16 prompts of 4,096; keys and values of 4
    # heads of 128 in 2 bytes. Drawing takes 32 bytes a row and word.
    [table] = tables([*OWN, "--model.teacher=Qwen/Qwen2.5-7B-Instruct"])
    tokens = 64 * 1024 * (1 + 0.5 / 28) + 16 * 4096
    assert table["generate"]["kv cache"] == near(tokens * 28 * 2 * 4 * 128 * 2 + 64 * 32 * 152_064)


def test_time_is_tokens_by_stated_rates() -> None:
    weights, prompts = 1_543_714_304, "--plan.prompt_length=512"
    generate = ["--config=own_rows/generate", "--data.max_rows=4000", "--rollouts.num_traces=4", prompts]
    train, traces = planned([[*OWN, prompts], generate])
    # 16 problems with 16 texts of at most 1,024 tokens; HFEngine samples 64 at a time, a token in 40 ms.
    # Weights are read five times: by reference and student, once forward and twice backward.
    sampled, read = 256 * 1024 / 3, (16 * 512 + 256 * 1024) / 3
    seconds = (sampled / 64 + 1024) * 0.04 + 2 * read * 5 * weights / 300e12
    assert f"{sampled:,.0f} sampled, {read:,.0f} read (" in train["page"]
    assert f"time: {seconds:,.1f} s a step, {seconds / 36:.1f} hours for 100, by" in train["page"]
    # A worker: 10,000 tokens/s, then 10 ms a token of the longest. Teacher and student score.
    seconds = sampled / 10_000 + 10.24 + 2 * (64 * 512 / 3 + sampled) * 2 * weights / 300e12
    assert f"time: {seconds:,.1f} s a batch, {63 * seconds / 3600:.2f} hours for 63, by" in traces["page"]


@contextmanager
def counting_saved(model: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Yield the bytes that autograd keeps inside the block, by storage, without the model's own tensors."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    sizes: dict[int, int] = {}
    held: list[Tensor] = []  # so that no address is used twice

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield sizes


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("dtype", "mixed"), [("float32", False), ("bfloat16", False), ("float32", True)])
def test_activations_are_what_autograd_keeps(family: str, dtype: str, mixed: bool, tmp_path: Path) -> None:
    found = []
    for number in (2, 5):
        sizes = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 416, "head_dim": 32}
        folder = str(tmp_path / str(number))
        build(family, folder, num_hidden_layers=number, **sizes)
        model = load_model(folder, dtype).train()
        sequences = [ScoredSequence([1] * 64, [2] * 96, [False] * 159 + [True]) for _ in range(2)]
        packed = PackedSequences.from_sequences(sequences, ((0, 1),))
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed), counting_saved(model) as sizes:
            scored_hidden_states(model, packed)
        settings = SFTModule(folder, OptimizerConfig(lr=1e-3))
        shape = Model(settings, folder, dtype, None, mixed, "whole")
        found.append(sum(sizes.values()) - shape.cast_bytes)
    assert (found[1] - found[0]) / 3 / 256 == pytest.approx(shape.kept, rel=0.1)


def check_phases(plan: dict[str, Any]) -> None:
    """Check that all phases are planned, and prompts: a sampled one holds no solution, a scored one does."""
    assert plan["status"] == 0, plan
    assert list(read_table(plan["page"])) == ["generate", "score", "train", "step"]
    text = " ".join(plan["page"].split())
    found = re.search(r"prompts of up to (\d+) tokens .* read prompts, with solutions, of up to (\d+)", text)
    assert found is not None, plan
    assert int(found[2]) > int(found[1])


@pytest.mark.parametrize(
    ("options", "has_teacher"),
    [
        ([], True),  # a copy of the student
        full(["--model.teacher_weights=live"], False),
        (["--config=add/lora", "--model.estimator=sampled"], False),
    ],
)
def test_distillation_is_planned_with_its_teacher(options: list[str], has_teacher: bool) -> None:
    [plan] = planned([["--config=laptop/opd", "--model.teacher=null", *options]])
    check_phases(plan)
    assert ("  reference miniature" in plan["page"]) == has_teacher


def test_a_teacher_s_logits_stand_beside_the_policy_s() -> None:
    models = [f"--model.{role}=Qwen/Qwen2.5-0.5B-Instruct" for role in ("pretrained", "teacher")]
    command = ["--config=recipe_7b/opd", *models, "--rollouts.engine=HFEngine"]
    full_words, sampled = tables(command, [*command, "--model.estimator=sampled"])
    assert full_words["train"]["teacher weights"] == near(2 * 494_032_768)
    # Three more tiles of 512 MiB, and the teacher's hidden states.
    assert full_words["train"]["head"] > sampled["train"]["head"] + 1.5


@pytest.mark.parametrize(("scorer", "part"), [("policy", None), full("reference", "  reference miniature")])
def test_likelihood_rewards_are_planned_with_their_scorer(scorer: str, part: str | None) -> None:
    options = [f"--model.student={scorer}", "--data.force_format=true"]
    [plan] = planned([["--config=laptop/likelihood", *options]])
    check_phases(plan)
    for name in ("reference", "student"):
        assert (f"  {name} " in plan["page"]) == (part is not None and name in part)


def test_run_without_training_has_no_train_phase(tmp_path: Path) -> None:
    found = {"laptop/generate": ["generate", "score"], "recipe_7b/score": ["score"]}
    for plan, phases in zip(planned([["--config", c] for c in found], tmp_path), found.values(), strict=True):
        check(plan, "predict")
        assert list(read_table(plan["page"])) == phases


def test_what_does_not_fit_ends_with_status_1() -> None:
    [plan] = planned([[*RECIPE, "--plan.device_gib=1"]])
    assert plan["status"] == 1
    assert "does not fit: " in plan["page"]


def test_devices_and_strategies_are_read_as_the_trainer_would() -> None:
    for devices, ids in ((3, [0, 1, 2]), ("3", [0, 1, 2]), ("0,2", [0, 2]), ([1, 5], [1, 5]), ("auto", [0])):
        assert list_devices(devices, True) == ids
    assert read_sharding("auto", 1) == ("whole", {})
    assert read_sharding("auto", 2) == ("ddp", {})
    settings = {"stage": 1, "offload_optimizer": True}
    named = {"class_path": "rlt_lightning.strategies.DeepSpeed", "init_args": settings}
    assert read_sharding(named, 8) == ("zero1", settings)
    assert read_sharding("deepspeed_stage_2", 8) == ("zero2", {"stage": 2})


def launches() -> dict[str, tuple[str, list[str]]]:
    """Return verb and options of every config's launch line, without folders of earlier stages."""
    found = {}
    for path in (*CONFIGS, *OVERLAYS):
        [line] = [line for line in path.read_text().splitlines() if line.startswith("# Run: rlt ")]
        verb, *words = line.split()[3:]
        if verb == "test":  # an evaluation is not planned
            continue
        pairs = list(zip(words[::2], words[1::2], strict=True))
        kept = [pair for pair in pairs if pair[0] in ("--config", "--trainer.devices")]
        # The model of an earlier stage is not here.
        earlier = ["--model.teacher", "miniature"] * ("teacher: runs/" in path.read_text())
        found[name_of(path)] = verb, [*(word for pair in kept for word in pair), *earlier]
    return found


def check(plan: dict[str, Any], verb: str = "fit") -> None:
    """Check that a command printed the plan of its verb, whether or not the run fits, and asked nobody."""
    assert plan["status"] in (0, 1), plan
    assert plan["page"].startswith(f"rlt {verb}, "), plan
    # Only training has gradients, an optimizer and checkpoints.
    found = ["train" in read_table(plan["page"]), "checkpoint" in plan["page"]]
    assert found == [verb == "fit"] * 2, plan
    assert verb == "fit" or "gradients" not in plan["page"], plan
    assert plan["attempts"] == [], plan


@pytest.mark.full
@pytest.mark.parametrize("part", range(4))
def test_every_config_and_overlay_is_planned_without_a_network(part: int, tmp_path: Path) -> None:
    found = list(launches().values())[part::4]
    for plan, (verb, _) in zip(planned([words for _, words in found], tmp_path), found, strict=True):
        check(plan, verb)


def test_published_shapes_have_the_published_number_of_weights(tmp_path: Path) -> None:
    for family in yaml.safe_load(SHAPES.read_text()):
        for size in family["sizes"]:
            (tmp_path / "config.json").write_text(json.dumps(family["config"] | size["config"]))
            model = meta_model(str(tmp_path))
            assert sum(p.numel() for p in model.parameters()) == size["parameters"], size["names"]


SFT = ["--config=research/configs/correctness_warmup.yaml", "--data.prompts_per_step=32"]
RLT = ["--config=laptop/smollm2_rlt", "--model.teacher=smollm2-135m"]
RLT += ["--model.student_dtype=float32", "--trainer.precision=32-true"]
LONG, SHORT = "--model.micro_batch_tokens=2048", "--rollouts.sampling.max_completion_length=8"
ZERO3 = ["--config=hardware/zero3", "--trainer.devices=2", "--model.micro_batch_tokens=1024"]
MEASURED = {  # set-ups of research/speed.md
    "rlt": RLT,
    "sft": [*SFT, LONG],
    "sft_checkpointing": [*SFT, LONG, "--model.gradient_checkpointing=true"],
    "sft_bfloat16": [*SFT, LONG, "--model.dtype=bfloat16"],
    "sft_mixed": [*SFT, LONG, "--trainer.precision=bf16-mixed"],
    "sft_ddp": [*SFT, "--model.micro_batch_tokens=1024", "--trainer.devices=2"],
    "sft_zero1": [*SFT, *ZERO3, "--trainer.strategy=deepspeed_stage_1"],
    "sft_zero3": [*SFT, *ZERO3],
    "rlt_fsdp2": [*RLT, "--config=hardware/fsdp2", "--trainer.devices=2", SHORT],
    "rlt_zero3": [*RLT, *ZERO3, SHORT],
}


def write_sums(folder: Path) -> str:
    """Write the rows of SFT; return the option that names them."""
    subprocess.run([sys.executable, ROOT / "research" / "arithmetic.py", folder], check=True)
    return f"--data.source={folder / 'warmup.jsonl'}"


@pytest.mark.docs
def test_memory_is_what_ten_measured_runs_needed(smollm2: str, tmp_path: Path) -> None:
    sums = write_sums(tmp_path)
    commands = [[*words, sums] if SFT[0] in words else words for words in MEASURED.values()]
    page = (ROOT / "research" / "speed.md").read_text()
    rows = re.findall(r"^\| `(\w+)`.*\| ([\d.]+) \| ([\d.]+) \| [\d.]+ \|$", page, re.MULTILINE)
    found = dict(zip(MEASURED, tables(*commands), strict=True))
    assert [name for name, *_ in rows] == list(MEASURED)
    for name, predicted, measured in rows:
        # This process is larger than that of a plan: 0.42 GiB, as the page says.
        peak = max(phase["total (* the peak)"] - phase["runtime"] + 0.42 for phase in found[name].values())
        assert peak == pytest.approx(float(measured), rel=0.15), name
        assert peak == pytest.approx(float(predicted), rel=0.01), name


@pytest.mark.slow
def test_a_real_run_peaks_where_the_plan_says(smollm2: str, tmp_path: Path) -> None:
    arguments = [SFT[0], write_sums(tmp_path)]  # 500 tokens
    # Blocks that are freed go back at once: resident memory is then what is in use.
    exact = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    plan = rlt("plan", *arguments)
    assert plan.returncode == 0, plan.stderr
    run = [f"--output_dir={tmp_path / 'run'}", "--trainer.max_steps=2", "--export.enabled=false"]
    fit = rlt("fit", *arguments, *run, "--checkpoint.every_n_train_steps=100", fresh=True, **exact)
    assert fit.returncode == 0, fit.stderr[-2000:]
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        measured = float(list(csv.DictReader(file))[-1]["perf/train_peak_gib"])
    table = read_table(plan.stdout)
    predicted = max(table[name]["total (* the peak)"] for name in ("train", "step"))  # the metric covers both
    assert predicted == pytest.approx(measured, rel=0.15)
