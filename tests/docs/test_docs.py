"""Every code block of README, CONTRIBUTING, AGENTS, docs/ and research/ is run or parsed.

A block with a title is a file of that name; those of docs/extend.md are run by test_extending.py,
test_python.py, test_lightning.py and test_integrations.py, the others below.

bash runs each shell block with stand-ins for all programs, which record how they were called. CHECKED then
has a check of the call for every program. A program without one is not found, and fails the test.

A block that starts with a file's name as a comment, such as `# gpu_1plus1.yaml`, is that file for its page.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import ROOT, python, rlt, run_python, run_rlt
from fake_worker import FakeWorker, worker_of
from parsed import VERBS, check_rlt
from tiny import TINY, tiny_options

from rlt_lightning.cli import stages
from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.run.jsonl import read_json_rows
from rlt_lightning.run.shipped import find_config

FOLDERS = [*(ROOT / "docs").glob("*.md"), *(ROOT / "research").glob("*.md")]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")), *sorted(FOLDERS)]
# Commands that are run at tiny size, by how they start, and what else that needs; besides the first page's.
RUN: dict[str, list[str]] = {
    "rlt fit --config laptop/rlt --output_dir runs/q": [
        "--data.num_embedded_rows=10",
        "--checkpoint.every_n_train_steps=1",
    ],
    "rlt fit --config laptop/rlt --trainer.callbacks+ mine.Shortest": [],
    "rlt export --ckpt_path": [],
    "rlt validate --config laptop/smollm2_rlt": ["--data.num_embedded_rows=4"],
    "rlt predict --config recipe_7b/rank --data.source FILE": [],
    "rlt plan --config laptop/smollm2_rlt": [],
    "rlt explain runs/warmup": ["--sampling.max_completion_length=4"],
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    title: str = ""

    def file(self) -> str | None:
        """The name of the file that this is, if its title or its first line says so."""
        name = re.match(r"# ([\w/.-]+\.(?:yaml|py|json))$", self.text.partition("\n")[0])
        return self.title or (name[1] if name else None)


def blocks_of(page: Path) -> Iterator[Block]:
    text, name = page.read_text(), str(page.relative_to(ROOT))
    fences = r'^( *)```(\w*)(?: title="([\w.]+)")?\n(.*?)^\1```$'
    for fence in re.finditer(fences, text, re.MULTILINE | re.DOTALL):
        line = text[: fence.start()].count("\n") + 1
        yield Block(name, line, fence[2], textwrap.dedent(fence[4]), fence[3] or "")


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks(language: str) -> pytest.MarkDecorator:
    """Return a mark that gives a test each block of a language, but for those with a title."""
    here = [b for b in BLOCKS if b.language == language and not b.title]
    cases = [pytest.param(block, id=f"{block.page}:{block.line}") for block in here]
    return pytest.mark.parametrize("block", cases)


def page_files(page: str, folder: Path) -> Path:
    """Write the files that blocks of a page are."""
    for block in BLOCKS:
        if block.page == page and (name := block.file()) is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(block.text)
    return folder


# Commands of the command line


# Programs


def check_make(arguments: list[str], files: Path) -> None:
    subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, check=True, capture_output=True)


def check_script(arguments: list[str], files: Path) -> None:
    script = ROOT / arguments[0]
    assert os.access(script, os.X_OK), f"{script} cannot be run"
    subprocess.run(["bash", "-n", script], check=True)


def check_python(arguments: list[str], files: Path) -> None:
    """Run what is given on the command line; of a script, find its file and its options."""
    match arguments:
        case ["-c", code]:
            exec(code, {})
        case ["-m", "venv", _]:
            pass
        case ["-m", "pytest", *options]:
            for option in options:
                assert not option.startswith("tests/") or (ROOT / option.partition("::")[0]).exists(), option
        case ["-m", "http.server", *_]:
            pass
        case [script, *options]:
            path = files / script if (files / script).is_file() else ROOT / script
            text = path.read_text()
            assert all(option in text for option in options if option.startswith("--"))
        case _:
            pytest.fail(f"python {arguments}: what is this?")


def check_pip(arguments: list[str], files: Path) -> None:
    extras = re.findall(r"(?:\.|rlt-lightning)\[([\w,-]+)\]", " ".join(arguments))
    project = (ROOT / "pyproject.toml").read_text()
    assert all(
        re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in ",".join(extras).split(",") if extra
    )


def check_vllm(arguments: list[str], files: Path) -> None:
    assert arguments[0] == "serve"
    options = dict(pairwise(arguments))
    json.loads(options.get("--weight-transfer-config", "{}"))
    module, _, name = options.get("--worker-extension-cls", "").rpartition(".")
    assert not name or f"class {name}" in (ROOT / f"{module.replace('.', '/')}.py").read_text()


def check_torchrun(arguments: list[str], files: Path) -> None:
    start = arguments.index("-m")
    assert arguments[start + 1] == "rlt_lightning"
    check_rlt(arguments[start + 2 :], files)


def check_sbatch(arguments: list[str], files: Path) -> None:
    wrapped = [word.removeprefix("--wrap=") for word in arguments if word.startswith("--wrap=")]
    # Before the program may stand variables.
    words = [
        word for word in (wrapped[0].split() if wrapped else arguments) if "=" not in word or word[0] == "-"
    ]
    if words[0] == "srun":
        words = [*dropwhile(lambda word: word == "srun" or word[0] == "-", words)]
    if words[0] != ".venv/bin/rlt":
        check_script(words[:1], files)
    if not wrapped:
        check_rlt(["fit", *arguments[1:]], files)


def check_docker(arguments: list[str], files: Path) -> None:
    """Of an image that is built, the arguments must be the Dockerfile's; what it runs is rlt's."""
    if arguments[0] == "build":
        given = [value.partition("=")[0] for name, value in pairwise(arguments) if name == "--build-arg"]
        known = re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        assert set(given) <= set(known)
    else:
        check_rlt(arguments[arguments.index("rlt_lightning") + 1 :], files)


def check_recipe_file(arguments: list[str], files: Path) -> None:
    assert all((ROOT / word).is_file() for word in arguments if word.endswith(".yaml"))


def nothing(arguments: list[str], files: Path) -> None:
    """There is nothing to check before it is run."""


Check = Callable[[list[str], Path], None]
CHECKED: dict[str, tuple[Check, str]] = {  # program -> its check, and why that is all, if it is
    "rlt": (check_rlt, "read by the real parser; a command of every verb is run, see RUN"),
    "make": (check_make, "a dry run: the targets take minutes, and pytest runs under one of them"),
    "vllm": (check_vllm, "needs vLLM, and mostly a GPU; tests/integration/test_vllm_worker.py starts one"),
    "pip": (check_pip, "installs gigabytes"),
    "python": (check_python, "benchmarks take minutes and all of the machine"),
    "torchrun": (check_torchrun, "needs GPUs; test_restarts.py and test_multinode.py run it on CPUs"),
    "sbatch": (check_sbatch, "needs a SLURM cluster; tests/integration/test_multinode.py has stand-ins"),
    "docker": (check_docker, "needs a Docker engine; docs/hardware.md says how it was built"),
    "kubectl": (check_recipe_file, "needs a cluster; the recipes are checked below"),
    "sky": (check_recipe_file, "needs a cluster; the recipes are checked below"),
    "pip-audit": (nothing, "asks the package index"),
    "cat": (nothing, "reads a file of the user's"),
    "head": (nothing, "reads a file of the user's"),
    "curl": (nothing, "run against a fake worker below"),
    "openssl": (nothing, "makes a random key"),
    "git": (nothing, "clones and commits"),
    "tensorboard": (nothing, "a server that does not end"),
    "wandb": (nothing, "needs an account"),
    "hf": (nothing, "needs an account"),
    "transformers": (nothing, "a server that does not end, and its client"),
    "mkdocs": (nothing, "a server that does not end; make docs builds the pages"),
    "playwright": (nothing, "downloads a browser"),
    "ruff": (nothing, "run by make check"),
}
PLACES = (".venv/bin",)  # of further programs of these names
STAND_IN = '#!/bin/sh\nprintf "%s\\0" "$0" "$@" > "$CALLS/$$"\n'  # a file each: some run side by side


def calls_of(block: Block, folder: Path) -> list[list[str]]:
    """Run a shell block with stand-ins; returns the program and the arguments of every call."""
    checkout = folder / "checkout"
    scripts = [
        path.relative_to(ROOT) for name in ("scripts", "examples") for path in (ROOT / name).glob("*.sh")
    ]
    programs = [f"{place}/{name}" for place in ("programs", *PLACES) for name in (*CHECKED, "python3")]
    for program in (*map(str, scripts), *programs):
        (checkout / program).parent.mkdir(parents=True, exist_ok=True)
        (checkout / program).write_text(STAND_IN)
        (checkout / program).chmod(0o755)
    (checkout / ".venv/bin/activate").touch()
    (checkout / "rlt_lightning").symlink_to(checkout)  # what git clone makes
    record = folder / "calls"
    record.mkdir()
    environment = {"PATH": str(checkout / "programs"), "CALLS": str(record), "HOME": str(folder)}
    script = f"set -u\nVLLM_API_KEY=key\n{block.text}\nwait\n"
    done = subprocess.run(
        ["/bin/bash", "-c", script], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert not done.stderr, done.stderr  # such as: command not found
    calls = sorted(record.iterdir(), key=lambda call: (call.stat().st_mtime_ns, int(call.name)))
    words = [call.read_text().removesuffix("\0").split("\0") for call in calls]
    return [[os.path.relpath(checkout / program, checkout), *arguments] for program, *arguments in words]


def empty_folder(folder: Path) -> Path:
    """A folder in which commands work without a checkout around them."""
    (folder / "empty").mkdir()
    return folder / "empty"


@blocks("sh")
def test_a_shell_block_is_right(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(empty_folder(tmp_path))
    calls = calls_of(block, tmp_path)
    assert calls, "runs nothing: a block that only shows something is ```text"
    files = page_files(block.page, tmp_path / "files")
    for program, *arguments in calls:
        if program.endswith(".sh"):
            check_script([program], files)
        else:
            check, _ = CHECKED[Path(program).name.replace("python3", "python")]
            check(arguments, files)


PIPELINES = ["pipeline.sh", "pipeline_8gpu.sh", "rounds.sh", "own_rows.sh rows.jsonl"]
PIPELINES += ["pipeline_8gpu.sh  # FAITHFUL=1 STRATEGY=zero3", "own_rows.sh rows.jsonl  # LORA=1"]


@pytest.mark.parametrize("name", PIPELINES)
def test_the_stages_of_a_pipeline_are_right(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    prepare = (
        f"PATH=$PATH:/usr/bin:/bin; cp {ROOT}/examples/*.sh examples/; mkdir -p runs/released/evaluate_rlt"
    )
    prepare += "; cd runs; mkdir -p rounds/round0/traces rounds/round0/evaluation"
    prepare += "; touch rounds/round0/traces/distillation.jsonl rounds/round0/evaluation/evaluation.md; cd .."
    command, _, variables = name.partition("  # ")
    script = f"{prepare}; touch runs/released/evaluate_rlt/evaluation.md; {variables} examples/{command}"
    calls = calls_of(Block(name, 1, "sh", script), tmp_path)
    stages = [words for program, *words in calls if program in (".venv/bin/rlt", "programs/rlt")]
    assert len(stages) >= 5
    undone = [words for words in stages if any(word.startswith("add/faithful") for word in words)]
    assert len(undone) == (len([w for w in stages if w[0] != "test"]) if "FAITHFUL" in variables else 0)
    for words in stages:
        if "LORA" in variables and words[0] == "fit":
            assert "add/lora" in words
            assert ("--model.optimizer.lr 1e-4" in " ".join(words)) == ("own_rows/rlt" not in words)
    for words in stages:
        check_rlt(words, tmp_path)


def check_recipe(plan: list[str], fit: list[str], folder: Path) -> None:
    """Both commands parse and mean the same run."""
    assert fit[: len(plan)] == ["fit", *plan[1:]]
    for words in (plan, fit):
        check_rlt(words, folder)


def test_the_recipes_for_clouds_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = yaml.safe_load((ROOT / "examples/cloud/skypilot.yaml").read_text())
    start = 'cd() { [ "$1" = /opt/rlt/rlt_lightning ]; }\n'  # that folder is in the image only
    [[_, *plan], [_, *fit]] = calls_of(Block("skypilot.yaml", 1, "sh", start + recipe["run"]), tmp_path)
    check_recipe(plan, fit, tmp_path)
    recipe = yaml.safe_load((ROOT / "examples/cloud/jobset.yaml").read_text())
    [replicated] = recipe["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    check_recipe(pod["initContainers"][0]["args"], pod["containers"][0]["args"], tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_within_the_text_are_right(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(empty_folder(tmp_path))
    for command in re.findall(r"`((?:rlt|make) [^`…]+)`", page.read_text()):
        program, *arguments = shlex.split(command)
        if program == "make" or re.search(r" --(?!\w+\.help)[\w.]+ \w", command):  # else the name of a verb
            CHECKED[program][0](arguments, tmp_path)


@blocks("yaml")
def test_a_yaml_block_is_an_overlay(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(empty_folder(tmp_path))
    assert isinstance(yaml.safe_load(block.text), dict)
    if (name := block.file()) is not None and (ROOT / name).is_file():
        assert yaml.safe_load(block.text) == yaml.safe_load((ROOT / name).read_text()), (
            f"not what {name} says"
        )
    (tmp_path / "block.yaml").write_text(block.text)
    check_rlt(["fit", "--config", "laptop/rlt", "--config", "block.yaml"], page_files(block.page, tmp_path))


@blocks("json")
def test_a_json_block_parses(block: Block) -> None:
    json.loads(block.text)


# What is run


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source with two traces of each problem."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    row = {
        "question": "1 + 1?",
        "solution": "2",
        "reasoning_trace": "One and one.",
        "other_trace": "Two ones.",
    }
    path.write_text(f"{json.dumps(row)}\n" * 4)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that stands for runs/."""
    return tmp_path_factory.mktemp("runs")


def run_documented(words: list[str], further: list[str], runs: Path, rows: Path, model: str) -> None:
    """Run a command of the documentation at tiny size."""
    verb, *options = words
    configs = [option for name, option in pairwise(options) if name == "--config"]
    tiny = tiny_options(verb, yaml.safe_load(find_config(configs[0]).read_text()), model) if configs else []
    tiny = TINY if verb == "plan" else tiny
    end = 2 * len(configs)  # what follows the configs is the command's own, and counts
    known = {"FILE": str(rows), "ID": model, "DIR": str(runs / "scores"), "model": str(runs / "exported")}
    known |= dict.fromkeys(("runs/RUN/checkpoints/step=000120.ckpt", "runs/teacher"), str(runs / "q"))
    known |= dict.fromkeys(("runs/student_sft/model", "runs/smollm2_warmup/model"), model)
    known |= dict.fromkeys(("runs/warmup", "miniature"), model) if verb == "explain" else {}
    options = [*options[:end], *tiny, *options[end:], *further]
    options = [known.get(option, re.sub(r"^runs/", f"{runs}/", option)) for option in options]
    if verb in stages.TRAINER_VERBS and "--output_dir" not in options:
        options += ["--output_dir", str(runs / verb)]
    run_rlt(verb, *options, cwd=runs)


def documented(start: str, folder: Path) -> list[str]:
    """The command of the documentation that starts so."""
    for number, block in enumerate(BLOCKS):
        if block.language == "sh" and start.split()[1] in block.text:
            for program, *arguments in calls_of(block, folder / str(number)):
                if " ".join([Path(program).name, *arguments]).startswith(start):
                    return arguments
    raise AssertionError(f"{start} is not in the documentation")


@pytest.mark.parametrize("start", RUN)
def test_a_documented_command_runs(
    start: str, runs: Path, rows: Path, tiny_model: str, tmp_path: Path
) -> None:
    page_files("README.md", runs)  # a callback
    run_documented(documented(start, tmp_path), RUN[start], runs, rows, tiny_model)


def test_the_first_page_runs(runs: Path, rows: Path, tiny_model: str, tmp_path: Path) -> None:
    files = page_files("docs/index.md", tmp_path / "files")
    for number, block in enumerate(block for block in BLOCKS if block.page == "docs/index.md"):
        for program, *arguments in calls_of(block, tmp_path / str(number)) if block.language == "sh" else []:
            if Path(program).name == "rlt" and arguments[0] in VERBS:
                words = [str(files / word) if (files / word).is_file() else word for word in arguments]
                run_documented(words, [], runs, rows, tiny_model)


def run_block(title: str, folder: Path, names: dict[str, Path]) -> None:
    """Run the Python block with a title in a folder, with paths in place of names."""
    [code] = [block.text for block in BLOCKS if block.title == title]
    for name, path in names.items():
        code = code.replace(name, str(path))
    run_python(code, folder, HF_DATASETS_CACHE=str(folder / "cache"))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_sixteen_groups_by_reward_teach_students(tiny_model: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    rows = [{"question": f"{n} + 1?", "solution": f"{n + 1}", "reasoning_trace": "So."} for n in range(32)]
    source = write_rows(runs / "rows.jsonl", rows)
    rank = "rlt predict --config recipe_7b/rank --data.source runs/released/"
    tiny = ["--data.source", str(source), "--model.teacher", tiny_model, "--model.student", tiny_model]
    tiny += ["--model.dtype", "float32", "--model.student_dtype", "float32"]
    run_documented(documented(rank, tmp_path / "calls"), tiny, runs, source, tiny_model)
    run_block("groups.py", tmp_path, {})
    groups = [[*read_json_rows(runs / "ranked" / f"group_{n}.jsonl")] for n in range(1, 17)]
    rewards = [row["reward"] for row in read_json_rows(runs / "ranked" / "scores.jsonl")]
    in_order = [row["reward"] for group in groups for row in group]
    assert in_order == pytest.approx(sorted(rewards, reverse=True))
    assert in_order[0] > in_order[-1]
    assert [len(group) for group in groups] == [2] * 16
    sft = "rlt fit --config recipe_7b/sft --config hardware/fsdp2 --trainer.devices 8 --data.source "
    sft += "runs/ranked/group_1.jsonl"
    one_process = ["--trainer.devices", "1", "--trainer.strategy", "auto"]
    run_documented(documented(sft, tmp_path / "fit"), one_process, runs, source, tiny_model)
    assert (runs / "group_1" / "model").is_dir()


def test_sources_are_mixed_filtered_and_read(tiny_model: str, tmp_path: Path) -> None:
    asked = "Let $n$ be the number of ways to tile a 2 x 10 board with dominoes. Find n + 1."
    write_rows(tmp_path / "math500" / "test.jsonl", [{"problem": asked}, {"problem": "What is 7 - 3?"}])
    write_rows(tmp_path / "aime24" / "train.jsonl", [{"problem": "Find 2^5 + 1."}])
    names = ("generated", "stratos")
    for name in names:
        questions = [f"{name}: what is {n} + 3?" for n in range(60)]
        questions += ["what is 7 - 3", f"Twice. {asked.lower()} Prove it.", "What is 7 + 3?"]
        answer = "<|begin_of_thought|>\n\nT\n\n<|end_of_thought|>\n\n"
        answer += "<|begin_of_solution|>\n\n1\n\n<|end_of_solution|>"
        turns = [[{"from": "user", "value": q}, {"from": "assistant", "value": answer}] for q in questions]
        rows = [{"system": "S", "conversations": turn, "reward": 0.5} for turn in turns]
        write_rows(tmp_path / name / "train.jsonl", rows)
    run_block(
        "mix.py",
        tmp_path,
        {
            "HuggingFaceH4/MATH-500": tmp_path / "math500",
            "HuggingFaceH4/aime_2024": tmp_path / "aime24",
            "runs/generate/distillation.jsonl": tmp_path / "generated" / "train.jsonl",
            "bespokelabs/Bespoke-Stratos-17k": tmp_path / "stratos",
        },
    )
    mixed = [
        columns["conversations"][0]["value"] for _, columns in read_rows(str(tmp_path / "mixed.parquet"))
    ]
    shares = [sum(question.startswith(name) for question in mixed) / len(mixed) for name in names]
    assert 0.6 < shares[0] < 0.9
    assert sum(shares) > 0.9
    assert "What is 7 + 3?" in mixed
    assert not [question for question in mixed if "7 - 3" in question or "dominoes" in question]
    words = documented("rlt fit --config recipe_7b/sft --data.source mixed.parquet", tmp_path / "calls")
    run_documented(words, [], tmp_path, tmp_path, tiny_model)
    # A folder with a card, which names files by patterns.
    folder = page_files("docs/formats.md", tmp_path / "folder")
    for name in names:
        (folder / name).mkdir()
        shutil.copy(tmp_path / "mixed.parquet", folder / name)
    assert len(read_rows(str(folder))) == 2 * len(mixed)


NEW_TASK = "docs/task.md"
FEW = ["--data.prompts_per_step=2", "--data.max_rows=4"]
SMALL = {  # a stage of that page at tiny size, by verb and config
    "check laptop/warmup": [],
    "check laptop/rlt": ["--check.rows=8"],
    "fit laptop/warmup": FEW,
    "fit laptop/rlt": [*FEW, "--trainer.max_steps=1"],
    "fit laptop/sft": FEW,
    "predict laptop/generate": FEW,
    "test laptop/evaluate": ["--data.max_rows=4"],
}


def test_the_page_of_a_new_task_runs(tmp_path: Path) -> None:
    files = page_files(NEW_TASK, tmp_path / "files")
    done = set()
    for number, block in enumerate(block for block in BLOCKS if block.page == NEW_TASK):
        for program, *words in calls_of(block, tmp_path / str(number)) if block.language == "sh" else []:
            words = [str(files / word) if (files / word).is_file() else word for word in words]
            words = [word.replace("runs/", f"{tmp_path}/runs/") for word in words]
            if Path(program).name == "python" and (files / words[0]).is_file():
                environment = os.environ | {"PYTHONPATH": str(ROOT)}
                run = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment)
                assert run.returncode == 0
                continue
            stage = f"{words[0]} {words[words.index('--config') + 1]}" if "--config" in words else ""
            if stage not in SMALL:  # of rows without traces: test_own_rows.py runs their stages
                continue
            result = rlt(*words, *SMALL[stage], cwd=tmp_path)
            if words[0] == "check":  # a teacher of so few rows may fail it
                assert re.search(r"^\d+ checks: ", result.stdout, re.MULTILINE), result.stderr
            else:
                assert result.returncode == 0, result.stderr
            done.add(stage)
    assert done == set(SMALL)


SMALLER = {"max_completion_length=4096": "max_completion_length=1024", "=500,": "=50,", "=3000)": "=300)"}


@blocks("python")
def test_a_python_block_runs(block: Block, tiny_model: str, tmp_path: Path) -> None:
    for package in ("trl", "openai"):  # vLLM brings openai
        if f"from {package}" in block.text:
            pytest.importorskip(package)
    with worker_of(tiny_model, dev_mode=False) as worker:
        code = block.text
        names = {
            "runs/student_sft/model": tiny_model,
            "smollm2-135m": tiny_model,
            "http://127.0.0.1:8000": worker.url,
        }
        for name, value in (names | SMALLER).items():
            code = code.replace(name, value)
        path = os.pathsep.join(map(str, (ROOT, ROOT / "examples", page_files(block.page, tmp_path))))
        environment = {"PYTHONPATH": path, "VLLM_API_KEY": "key"}
        done = python(code, tmp_path, **environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "sh" and "curl " in b.text])
def test_curl_gets_an_answer(block: Block) -> None:
    with FakeWorker(model="student") as worker:
        script = block.text.replace("http://127.0.0.1:8000", worker.url)
        done = subprocess.run(
            ["bash", "-euc", script], env=os.environ | {"VLLM_API_KEY": "key"}, capture_output=True
        )
    assert done.returncode == 0, done.stderr
    assert "error" not in json.loads(done.stdout)
