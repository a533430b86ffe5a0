"""Shared by all tests: marks, the order of tests, and fixtures for models and runs.

    unit/<folder>/    one part of the package each
    integration/      whole runs, kills, several processes, real workers; ranks/: runs that share two ranks
    trajectories/     runs on recorded completions, step by step
    gpu/              a pretended GPU, and the script for a real one: all have the mark gpu
    docs/             the documentation and the project's own files: all have the mark docs
    support/          helper modules without tests

Five commands run them:

    make test           tests without a mark: every verb, stage, loss, layout, strategy and failure once
    make test-docs      marks docs and gpu
    make test-all       also mark full (further cases) and mark vllm (needs a real vLLM worker)
    make prove          mark slow: learning, kills at random moments, two nodes
    make test-research  research/tests

`.ci/run` runs the first two, and of the third what needs vLLM.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for the hub fails at once
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models are tiny, and threads that wait for each other are not
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # dozens of processes would each compile the package

import pytest
import torch

TESTS = Path(__file__).parent
SHARED = TESTS.parents[1] / "shared"
FIGURE = "figure: "  # begins a printed line that the summary repeats
LAST_LINES = 25  # of a failure, printed when it happens
DURATIONS = "rlt/durations"  # in pytest's cache: seconds of each group in the last run that had it
FIRST = ("integration/ranks", "docs", "gpu", "trajectories", "integration")  # until there are durations
NUM_WORDS = 8192  # of the tiny model: logits of SmolLM2's 49,152 words would be most of its work


# What is run


class Reports:
    """Print each failure at once, for a run may be stopped before its summary; keep what groups took."""

    def __init__(self, terminal: Any) -> None:
        self.terminal = terminal
        self.durations: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations[group_of(report.nodeid)] += report.duration
        if report.failed:
            lines = report.longreprtext.splitlines()
            self.terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)")
            for line in lines[-LAST_LINES:]:
                self.terminal.write_line(f"    {line}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if cache := getattr(session.config, "cache", None):
            cache.set(DURATIONS, cache.get(DURATIONS, {}) | self.durations)


def pytest_configure(config: pytest.Config) -> None:
    import commands

    gc.set_threshold(10_000)  # of 700 it takes a twelfth of the time
    commands.longest_s = float(config.getoption("timeout") or config.getini("timeout")) - 30


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    if terminal := plugins.get_plugin("terminalreporter"):  # processes of xdist have none
        plugins.register(Reports(terminal))


def folder_of(path: Path) -> str:
    """Return the folder of a test below this one; empty for a test of research/."""
    return path.parent.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""


def group_of(nodeid: str) -> str:
    """Return what keeps a test on the process that others of its group run on: mostly its file.

    Those of integration/ranks share processes, which take long to start; one of research/ is long by itself.
    """
    path = nodeid.partition("::")[0]
    if "/ranks/" in path:
        return "ranks"
    return nodeid if path.startswith("research/") else path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folder and those with a real vLLM worker as full; begin with the longest groups.

    Two processes then end at about the same time.
    """
    for item in items:
        folder = folder_of(item.path).partition("/")[0]
        if folder in ("docs", "gpu"):
            item.add_marker(folder)
        if item.get_closest_marker("vllm") and not item.get_closest_marker("slow"):
            item.add_marker("full")
        strategy = item.callspec.params.get("strategy", "") if hasattr(item, "callspec") else ""
        if str(strategy).startswith(("zero", "deepspeed")) and find_spec("deepspeed") is None:
            item.add_marker(pytest.mark.skip(reason="needs the deepspeed extra"))
    cache = getattr(config, "cache", None)
    durations = cache.get(DURATIONS, {}) if cache else {}

    def place(item: pytest.Item) -> tuple[float, int]:
        folder = folder_of(item.path)
        order = FIRST.index(folder) if folder in FIRST else len(FIRST)
        return -durations.get(group_of(item.nodeid), 0.0), order

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share out groups of tests; xdist's own groups need marks, which it does not see under pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


def pytest_collection_finish() -> None:
    gc.freeze()  # imported modules need not be looked at again


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the tests' figures."""
    reports = [report for name in ("passed", "failed") for report in terminalreporter.stats.get(name, [])]
    lines = [(report, line) for report in reports for line in report.capstdout.splitlines()]
    if found := [(report, line) for report, line in lines if line.startswith(FIGURE)]:
        terminalreporter.section("figures")
    for report, line in found:
        test = report.nodeid.partition("::")[2]
        terminalreporter.line(f"{test}: {line.removeprefix(FIGURE)}")


# Models, and runs that tests share


@pytest.fixture(scope="session")
def pretended_gpus() -> None:
    """The library of the pretended GPU, built before the first test that needs it, or a reason to skip."""
    from pretended_gpu.build import CannotBuild, library

    try:
        library()
    except CannotBuild as error:
        if "needs g++" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real rows and reference figures that lies beside a working copy."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the folder {SHARED.name} beside the checkout")
    return SHARED


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Folder of the embedded default model: SmolLM2-135M, fetched and converted once."""
    from rlt_lightning.models.embedded import embedded_model

    return str(embedded_model())


@pytest.fixture(scope="session")
def smol(smollm2: str) -> Any:
    """SmolLM2's tokenizer, to be read only."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="session")
def qwen(shared: Path) -> Any:
    """Qwen2.5's tokenizer, to be read only."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared / "data/tokenizers/Qwen2.5-Instruct")


@pytest.fixture(scope="session")
def miniature() -> str:
    """Folder of the embedded tiny model, pretrained on last-digit chains; `tiny.CHAINS` gives it its task."""
    from rlt_lightning.models.embedded import MINIATURES

    return str(MINIATURES["miniature"])


@pytest.fixture(scope="session")
def tiny_model(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a two-layer Llama with random weights and the first words of SmolLM2's: 0.6 M parameters."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUM_WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32 dimensions: vLLM's CPU attention takes no smaller heads
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    tokenizer["model"]["vocab"] = {word: i for word, i in vocabulary.items() if i < NUM_WORDS}
    tokenizer["model"]["merges"] = [pair for pair in merges if vocabulary["".join(pair)] < NUM_WORDS]
    path.write_text(json.dumps(tokenizer))
    return str(folder)


@pytest.fixture(scope="session")
def renumbered(miniature: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the miniature with its words numbered backwards: the same model, in other tokens."""
    from rlt_lightning.models.load import load_model

    folder = tmp_path_factory.mktemp("renumbered")
    model = load_model(miniature)
    last = model.config.vocab_size - 1
    described = json.loads((Path(miniature) / "tokenizer.json").read_text())
    described["model"]["vocab"] = {word: last - i for word, i in described["model"]["vocab"].items()}
    for token in described["added_tokens"]:
        token["id"] = last - token["id"]
    described["added_tokens"].sort(key=lambda token: token["id"])
    model.get_input_embeddings().weight.data = model.get_input_embeddings().weight.data.flip(0)
    model.tie_weights()
    for settings in (model.config, model.generation_config):
        settings.eos_token_id, settings.pad_token_id = last - 2, last
    model.save_pretrained(folder)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(miniature) / name, folder)
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return str(folder)


def make_once(name: str, make: Callable[[Path], None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all processes of the tests share; the first that asks for it makes it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, made = base / name, base / f"{name}.made"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a process that failed
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


def list_files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return size and time of every file."""
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file()}
    return {path: (status.st_size, status.st_mtime_ns) for path, status in found.items()}


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a finished run, `tiny.QUICKSTART`, to be read only: a test that changes it takes a copy.

    What the run printed lies beside it, in `stdout` and `stderr`.
    """
    from commands import run_rlt
    from tiny import QUICKSTART

    def make(folder: Path) -> None:
        result = run_rlt(*QUICKSTART, f"--output_dir={folder / 'run'}")
        (folder / "stdout").write_text(result.stdout)
        (folder / "stderr").write_text(result.stderr)

    folder = make_once("finished", make, tmp_path_factory)
    before = list_files(folder)
    yield folder / "run"
    assert list_files(folder) == before, "a test has changed the run that all share"


@pytest.fixture(scope="session")
def runs(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of runs by strategy, made as they are asked for; final weights and metrics lie beside them."""
    from ranks import Runs

    return Runs(tiny_model, tmp_path_factory.mktemp("runs"))
