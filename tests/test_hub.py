"""`rlt push` and `export.push_to_hub` against a fake hub: what arrives, loads, is refused and is kept."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, python, rlt
from fake_hub import FakeHub, faults, header_of
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import close_session
from tiny import QUICKSTART

from rlt_lightning.checkpoints.card import inherited_header, write_model_card
from rlt_lightning.cli.main import read_run
from rlt_lightning.hub.client import PushError
from rlt_lightning.hub.push import complete_model_card, push, redact_paths
from rlt_lightning.models.format import ModelFormat, write_format
from rlt_lightning.tags import R1
from rlt_lightning.types import InputError

TOKEN, READER, OTHER = "hf_alicesTokenThatMayWrite", "read_alicesTokenThatMayRead", "hf_bobsOwnToken"
BASE = {"README.md": "---\nlicense: llama3.1\nlicense_link: https://example.com/licence\n---\n# Base\n"}
ANSWERS = ["--data.max_rows=4", "--rollouts.sampling.max_completion_length=8"]


# In a process that has the client imported, which read its environment then.
AT_HUB = """
import sys
from huggingface_hub import constants
from rlt_lightning.__main__ import main
constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = {url!r}, False, True
sys.argv = ["rlt", *{words!r}]
main()
"""


@pytest.fixture(scope="module")
def real() -> Iterator[FakeHub]:
    """A hub that processes of their own use."""
    with FakeHub({TOKEN: "alice", READER: "alice", OTHER: "bob"}) as hub:
        yield hub


def environment(hub: FakeHub, folder: Path) -> dict[str, str]:
    own = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(folder), "HF_HUB_OFFLINE": "0"}
    return own | {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def pushed(real: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that pushed its model at its end, and what it printed."""
    folder = tmp_path_factory.mktemp("runs")
    options = [f"--output_dir={folder}/teacher", "--export.push_to_hub=alice/teacher"]
    code = AT_HUB.format(url=real.url, words=[*QUICKSTART, *options])
    result = python(code, ROOT, **environment(real, folder / "home"))
    assert result.returncode == 0, result.stderr
    return folder / "teacher", result.stdout + result.stderr


def evaluate(run: Path, folder: Path) -> Path:
    """Evaluate a run's model into a folder, and return that."""
    options = [f"--model.pretrained={run}/model", "--data.force_format=true", "--rollouts.num_samples=2"]
    result = rlt(
        "test", "--config=configs/miniature_evaluate.yaml", *ANSWERS, *options, f"--output_dir={folder}"
    )
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def evaluated(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluation of the finished run's model."""
    return evaluate(finished_run, tmp_path_factory.mktemp("evaluated") / "evaluation")


@pytest.fixture(scope="module")
def traces(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distillation set of the finished run's model."""
    folder = tmp_path_factory.mktemp("distilled") / "traces"
    options = [f"--model.teacher={finished_run}/model", "--data.num_embedded_rows=6"]
    options += ["--rollouts.sampling.max_completion_length=8", "--data.prompts_per_step=2"]
    result = rlt("predict", "--config=configs/miniature_generate.yaml", *options, f"--output_dir={folder}")
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that this process uses, with its token in the environment."""
    with FakeHub({TOKEN: "alice", READER: "alice", OTHER: "bob"}) as found:
        use(found.url, monkeypatch)
        yield found
    close_session()


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub's client, which reads its environment when it is imported, use this address."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    close_session()


@pytest.fixture
def model(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be changed."""
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run"


# What arrives


def test_a_run_pushes_its_model_at_its_end(pushed: tuple[Path, str], real: FakeHub) -> None:
    run, printed = pushed
    repo = real.repos["model", "alice/teacher"]
    assert f"Done: {real.url}/alice/teacher (private), from {run}" in printed
    assert repo.private
    first = [files for _, files in repo.commits][1]
    local = {path.name: path.read_bytes() for path in (run / "model").iterdir() if path.name != "README.md"}
    assert {name: first[name] for name in local} == local
    assert first.keys() - local.keys() == {".gitattributes", "README.md", "rlt_config.yaml"}
    # Before the first model was loaded.
    assert real.requests.index("POST /api/repos/create") < len(real.requests) // 2
    assert "push_to_hub: null" in first["rlt_config.yaml"].decode()


@pytest.mark.full
def test_a_push_adds_the_evaluation_in_one_commit(pushed: tuple[Path, str], real: FakeHub) -> None:
    run, _ = pushed
    evaluated = evaluate(run, run.parent / "evaluation")  # found, since it lies beside the run
    repo = real.repos["model", "alice/teacher"]
    before = len(repo.commits)
    result = rlt("push", str(run), fresh=True, **environment(real, run.parent / "home"))
    assert result.returncode == 0, result.stderr
    assert f"Evaluations on the card: {evaluated}" in result.stdout
    assert len(repo.commits) == before + 1
    card = repo.files["README.md"].decode()
    found = json.loads((evaluated / "evaluation.json").read_text())["sets"]["chains"]
    [entry] = header_of(card)["model-index"]
    assert entry["name"] == "teacher"
    [result_of_set] = entry["results"]
    assert result_of_set["dataset"] == {"name": found["title"], "type": "chains"}
    [pass_at_1, pass_at_k, _] = result_of_set["metrics"]
    assert pass_at_1 == {"type": "pass@1", "value": round(100 * found["pass_at_1"], 2), "name": "pass@1, %"}
    assert pass_at_k["type"] == "pass@2"
    assert f"| {found['title']} " in card
    assert "| `reward/mean` " in card
    assert "rlt explain alice/teacher --model.student" in card
    assert header_of(card)["license"] == "apache-2.0"
    assert faults(card) == []


LOAD = """
import datasets, torch
from huggingface_hub import DatasetCard, ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer
from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.pretrained import load_format
model = AutoModelForCausalLM.from_pretrained("alice/teacher")
local = AutoModelForCausalLM.from_pretrained("{run}/model")
assert all(torch.equal(value, local.state_dict()[name]) for name, value in model.state_dict().items())
assert AutoTokenizer.from_pretrained("alice/teacher").chat_template
assert load_format("alice/teacher").role == "teacher"
ModelCard.load("alice/teacher").validate()
DatasetCard.load("alice/traces").validate()
rows = datasets.load_dataset("alice/traces", split="train")
expected = datasets.Dataset.from_parquet("{traces}/distillation.parquet")
assert rows.to_list() == expected.to_list()
assert [row["question"] for _, row in read_rows("alice/traces")] == expected["question"][:]
"""


@pytest.fixture(scope="module")
def loaded(pushed: tuple[Path, str], traces: Path, real: FakeHub) -> subprocess.CompletedProcess[str]:
    """A process that loads the model and a set, pushed as well, into the client's cache beside the run."""
    with pytest.MonkeyPatch.context() as patch:
        use(real.url, patch)
        push(str(traces), "alice/traces", data=True)
    close_session()
    code = LOAD.format(run=pushed[0], traces=traces)
    own = os.environ | environment(real, pushed[0].parent / "home")
    return subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True)


def test_both_load_from_the_hub_by_their_ids(loaded: subprocess.CompletedProcess[str], real: FakeHub) -> None:
    assert loaded.returncode == 0, loaded.stderr
    repo = real.repos["dataset", "alice/traces"]
    assert repo.private
    assert repo.files.keys() == {".gitattributes", "README.md", "distillation.parquet", "rlt_config.yaml"}


def test_no_token_is_in_any_file_or_line(
    pushed: tuple[Path, str], loaded: subprocess.CompletedProcess[str], real: FakeHub
) -> None:
    run, printed = pushed
    assert TOKEN not in printed + loaded.stdout + loaded.stderr
    here = [path for path in run.parent.rglob("*") if path.is_file()]
    assert any("home" in path.parts for path in here)
    assert [path for path in here if TOKEN.encode() in path.read_bytes()] == []
    files = [
        content for repo in real.repos.values() for _, files in repo.commits for content in files.values()
    ]
    assert not any(TOKEN.encode() in content for content in (*files, *real.large.values()))
    assert not any(TOKEN in request for request in real.requests)


def test_weights_of_an_earlier_model_are_deleted(hub: FakeHub, model: Path) -> None:
    repo = hub.put("alice/m", {"model-00001-of-00002.safetensors": "old", "NOTES.md": "mine"}, private=True)
    push(str(model), "alice/m")
    assert "model-00001-of-00002.safetensors" not in repo.files
    assert repo.files["NOTES.md"] == b"mine"
    count = len(repo.commits)
    push(str(model), "alice/m")
    assert len(repo.commits) == count, "nothing has changed, so there is nothing to commit"


def test_a_model_folder_without_its_run_is_pushed_too(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model / "model", tmp_path / "exported")
    push(str(tmp_path / "exported"), "alice/exported")
    files = hub.repos["model", "alice/exported"].files
    assert "model.safetensors" in files
    assert "rlt_config.yaml" not in files
    assert b"## Training" not in files["README.md"]


@pytest.mark.full
def test_two_ranks_push_once(real: FakeHub, tmp_path: Path) -> None:
    options = [f"--output_dir={tmp_path}/run", "--export.push_to_hub=alice/two", "--trainer.devices=2"]
    result = rlt(*QUICKSTART, *options, fresh=True, **environment(real, tmp_path / "home"))
    assert result.returncode == 0, result.stderr
    assert len(real.repos["model", "alice/two"].commits) == 2


# The cards


def test_the_licence_is_that_of_the_base_model(hub: FakeHub, model: Path) -> None:
    hub.put("meta/base", BASE)
    card = model / "model" / "README.md"
    card.write_text(card.read_text().replace("license: apache-2.0", "base_model: meta/base"))
    push(str(model), "alice/m")
    header = header_of(hub.repos["model", "alice/m"].files["README.md"].decode())
    assert header["base_model"] == "meta/base"
    assert header["license"] == "llama3.1"
    assert header["license_link"] == "https://example.com/licence"


def test_an_unknown_licence_is_asked_for(
    hub: FakeHub, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = model / "model" / "README.md"
    card.write_text(card.read_text().replace("license: apache-2.0", "base_model: meta/gone"))
    push(str(model), "alice/m")
    assert "license" not in header_of(hub.repos["model", "alice/m"].files["README.md"].decode())
    assert f"Write `license: ID` into the header of {card}" in capsys.readouterr().err


def test_a_model_inherits_base_and_licence_of_a_local_one(tmp_path: Path) -> None:
    assert inherited_header("Qwen/Qwen2.5-7B-Instruct") == {"base_model": "Qwen/Qwen2.5-7B-Instruct"}
    assert inherited_header("smollm2-135m")["license"] == "apache-2.0"
    assert inherited_header(str(tmp_path)) == {}
    facts = {"pretrained": "Qwen/Qwen2.5-7B-Instruct", "lora": None, "training": {"method": "SFTModule"}}
    (tmp_path / "README.md").write_text(write_model_card(facts))
    assert inherited_header(str(tmp_path)) == {"base_model": "Qwen/Qwen2.5-7B-Instruct"}
    second = write_model_card(facts | {"pretrained": str(tmp_path)})
    assert header_of(second)["base_model"] == "Qwen/Qwen2.5-7B-Instruct"
    assert faults(second) == []
    (tmp_path / "README.md").write_text("---\n- no mapping\n---\n")
    assert inherited_header(str(tmp_path)) == {}


def test_what_a_user_wrote_into_a_card_stays(model: Path) -> None:
    card = model / "model" / "README.md"
    text = card.read_text().replace("license: apache-2.0", "license: mit\nlanguage: en")
    card.write_text(text + "\nWritten by hand.\n")
    found = complete_model_card(model / "model", model, "alice/m", [], lambda name: {})
    assert header_of(found)["license"] == "mit"
    assert header_of(found)["language"] == "en"
    assert "Written by hand." in found
    assert ModelCard(found).data.pipeline_tag == "text-generation"


def test_commands_are_those_of_what_the_model_is(tmp_path: Path) -> None:
    facts = {"pretrained": "meta/base", "lora": None, "training": {"method": "SFTModule"}}
    (tmp_path / "README.md").write_text(write_model_card(facts))
    write_format(ModelFormat("student", R1, ""), tmp_path)
    student = complete_model_card(tmp_path, None, "alice/m", [], lambda name: {"license": "mit"})
    assert "rlt chat --model.path alice/m" in student
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"] in student
    assert "rlt explain" not in student
    (tmp_path / "adapter_config.json").touch()
    adapter = complete_model_card(tmp_path, None, "alice/m", [], lambda name: {"license": "mit"})
    assert "vllm serve meta/base --enable-lora --lora-modules m=alice/m" in adapter


def test_places_on_this_machine_are_not_published() -> None:
    text = "from /home/alice/runs/warmup/model, ~/data/rows/a.jsonl and https://example.com/a/b/c"
    assert redact_paths(text) == "from …/warmup/model, …/rows/a.jsonl and https://example.com/a/b/c"
    assert redact_paths("a/b/c and runs/warmup/model, 1/2") == "a/b/c and runs/warmup/model, 1/2"


def test_rows_of_a_config_are_not_published(hub: FakeHub, model: Path) -> None:
    config = model / "config.yaml"
    rows = "[{question: my secret question, solution: s}, {question: q, solution: s}]"
    assert "source: chains" in config.read_text()
    config.write_text(config.read_text().replace("source: chains", f"source: {rows}"))
    push(str(model), "alice/m")
    files = hub.repos["model", "alice/m"].files
    assert b"    source: FILE\n" in files["rlt_config.yaml"]
    assert not any(b"secret question" in content for content in files.values())


def test_an_old_evaluation_is_left_out(
    hub: FakeHub, model: Path, evaluated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = model.parent / "old" / "evaluation.json"
    old.parent.mkdir()
    summary = json.loads((evaluated / "evaluation.json").read_text()) | {"model": str(model / "model")}
    old.write_text(json.dumps(summary))
    os.utime(old, (0, 0))
    (model.parent / "broken").mkdir()
    (model.parent / "broken" / "evaluation.json").write_text("{}")
    push(str(model), "alice/m")
    assert b"## Evaluation" not in hub.repos["model", "alice/m"].files["README.md"]
    said = capsys.readouterr().err
    assert "is older than" in said
    assert "broken/evaluation.json must hold the results of rlt test" in said
    push(str(model), "alice/m", evaluations=str(old.parent))
    assert b"## Evaluation" in hub.repos["model", "alice/m"].files["README.md"]


# Never GPQA's text


@pytest.mark.parametrize(
    "source", ["Idavidrein/gpqa:gpqa_diamond", "copies/GPQA_main.csv", "[{source: x/gpqa, weight: 1}]"]
)
def test_a_set_from_gpqa_is_refused(source: str, hub: FakeHub, traces: Path, tmp_path: Path) -> None:
    shutil.copytree(traces, tmp_path / "set")
    config = tmp_path / "set" / "config.yaml"
    assert "source: chains" in config.read_text()
    config.write_text(config.read_text().replace("source: chains", f"source: {source}"))
    with pytest.raises(InputError, match="GPQA's rows must not be published"):
        push(str(tmp_path / "set"), "alice/set", data=True)
    assert hub.requests == []


def test_a_set_with_gpqas_columns_is_refused(hub: FakeHub, traces: Path, tmp_path: Path) -> None:
    import datasets

    shutil.copytree(traces, tmp_path / "set")
    rows = [{"Correct Answer": "a", **{f"Incorrect Answer {i}": "b" for i in (1, 2, 3)}}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "set" / "distillation.parquet")
    with pytest.raises(InputError, match="its rows have GPQA's columns"):
        push(str(tmp_path / "set"), "alice/set", data=True)


@pytest.mark.parametrize("trail", ["script", "chain"])
def test_a_set_from_gpqa_is_refused_without_its_name_in_the_settings(
    trail: str, hub: FakeHub, traces: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(traces, first)
    card = first / "README.md"
    assert "| source | chains (" in card.read_text()
    card.write_text(
        card.read_text().replace("| source | chains (", "| source | rows.csv, my/GPQA_main.csv (")
    )
    (first / "config.yaml").unlink()  # as a script leaves it
    if trail == "chain":
        shutil.copytree(traces, second)
        config = second / "config.yaml"
        config.write_text(config.read_text().replace("source: chains", f"source: {first}/distillation.jsonl"))
    with pytest.raises(InputError, match=r"GPQA's rows must not be published.*my/GPQA_main\.csv"):
        push(str(first if trail == "script" else second), "alice/set", data=True)
    assert hub.requests == []


def test_figures_of_gpqa_are_published_without_its_text(
    hub: FakeHub, model: Path, evaluated: Path, tmp_path: Path
) -> None:
    summary: dict[str, Any] = json.loads((evaluated / "evaluation.json").read_text())
    gpqa = {"title": "GPQA Diamond", "source": "Idavidrein/gpqa:gpqa_diamond", "split": "train"}
    gpqa |= {"private": True, "template": "SECRET {question}", "prompt": "SECRET"}
    summary["sets"] = {"gpqa_diamond": summary["sets"]["chains"] | gpqa}
    (tmp_path / "gpqa").mkdir()
    (tmp_path / "gpqa" / "evaluation.json").write_text(json.dumps(summary))
    (tmp_path / "gpqa" / "responses.jsonl").write_text('{"response": "SECRET"}\n')
    push(str(model), "alice/m", evaluations=[str(tmp_path / "gpqa")])
    files = hub.repos["model", "alice/m"].files
    [result] = header_of(files["README.md"].decode())["model-index"][0]["results"]
    assert result["dataset"]["type"] == "Idavidrein/gpqa"
    assert not any(b"SECRET" in content for content in files.values())


# Failures


@pytest.mark.parametrize(
    ("token", "repo_id", "message"),
    [
        (None, "alice/m", "environment variable HF_TOKEN, which is not set"),
        ("hf_unknown", "alice/m", r"must accept the token in HF_TOKEN, but does not \(401\)"),
        (READER, "alice/m", r"must be allowed to write to .*/alice/m, but is not \(403\)"),
        (OTHER, "alice/m", r"must be allowed to write to .*/alice/m, but is not \(403\)"),
        (TOKEN, "alice/public", "is public, but a push is private"),
        (f"{TOKEN}\n{OTHER}", "alice/m", "HF_TOKEN must hold one token, but has spaces, line ends"),
        (f"{TOKEN}é", "alice/m", "HF_TOKEN must hold one token"),
        (TOKEN, "teacher", "must be USER/NAME, but is 'teacher'"),
        (TOKEN, "alice/a..b", r"a name that the hub takes: Cannot have -- or \.\. in repo_id"),
        (TOKEN, None, r"A push needs a repository: rlt push .* --repo_id USER/NAME"),
    ],
)
def test_a_push_that_may_not_be_says_why(
    token: str | None,
    repo_id: str | None,
    message: str,
    hub: FakeHub,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.move(model / "model", tmp_path / "exported")  # so that no config names a repository
    hub.put("alice/public", {"README.md": ""})
    monkeypatch.setenv("HF_TOKEN", token) if token else monkeypatch.delenv("HF_TOKEN")
    with pytest.raises((InputError, PushError), match=message) as raised:
        push(str(tmp_path / "exported"), repo_id)
    assert "\n" not in str(raised.value)
    assert token is None or not any(word in str(raised.value) for word in token.split())
    assert all(len(repo.commits) == 1 for repo in hub.repos.values())


@pytest.mark.parametrize("path", ["/lfs/", "/api/models/alice/m/commit", "/alice/m.git/info/lfs"])
def test_a_push_that_breaks_off_changes_nothing_and_is_repeated(path: str, hub: FakeHub, model: Path) -> None:
    repo = hub.put("alice/m", {"README.md": "as it was"}, private=True)
    hub.refused[path] = 413
    before = {path: path.read_bytes() for path in model.rglob("*") if path.is_file()}
    with pytest.raises(PushError, match=r"must take alice/m, but refuses it \(.*413.*Then push again"):
        push(str(model), "alice/m")
    assert repo.files == {"README.md": b"as it was"}
    assert {path: path.read_bytes() for path in model.rglob("*") if path.is_file()} == before
    push(str(model), "alice/m")
    assert repo.files["model.safetensors"] == (model / "model" / "model.safetensors").read_bytes()


def test_a_hub_out_of_reach_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(PushError, match=r"The hub http://127\.0\.0\.1:9 must be within reach, but is not"):
        push(str(model), "alice/m")
    close_session()


def test_a_card_that_the_hub_refuses_is_named(hub: FakeHub, model: Path) -> None:
    card = model / "model" / "README.md"
    card.write_text(card.read_text().replace("license: apache-2.0", "license: none of them"))
    with pytest.raises(PushError, match=r'header of the card .* "license" must be one of the list'):
        push(str(model), "alice/m")
    card.write_text("---\nlicense: [\n---\n")
    with pytest.raises(InputError, match=rf"The header of {card}, .* must be YAML"):
        push(str(model), "alice/m")


def test_a_token_for_one_repository_may_push_there(hub: FakeHub, model: Path) -> None:
    repo = hub.put("alice/m", {}, private=True)
    hub.refused["/api/repos/create"] = 403
    push(str(model), "alice/m")
    assert "model.safetensors" in repo.files
    hub.refused = {"/api/repos/create": 403, "/api/models/alice/m/auth-check": 403}
    with pytest.raises(PushError, match=r"\(403\)"):
        push(str(model), "alice/m")


def test_a_public_push_is_asked_for(hub: FakeHub, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    push(str(model), "alice/open", private=False)
    assert not hub.repos["model", "alice/open"].private
    assert f"Done: {hub.url}/alice/open (public), from {model}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("made", "data", "message"),
    [
        ([], False, "neither. Train first: rlt fit"),
        (["distillation.parquet"], False, "To push it: rlt push {folder} --data"),
        ([], True, "has no distillation.parquet. Make one: rlt predict"),
        (["model/config.json"], False, "model/README.md is missing"),
        (["checkpoints/step=000001.ckpt/state.pt"], False, "rlt export --ckpt_path {folder} --output_dir"),
    ],
)
def test_a_folder_without_an_export_says_what_to_run(
    made: list[str], data: bool, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(InputError, match=re.escape(message.format(folder=tmp_path))):
        push(str(tmp_path), "alice/m", data=data)


def test_offline_mode_and_a_missing_run_are_one_line_each(finished_run: Path) -> None:
    offline = rlt("push", str(finished_run), "--repo_id=alice/m", HF_TOKEN=TOKEN)
    assert offline.returncode == 2
    [line] = offline.stderr.splitlines()
    assert line.startswith("rlt: error: A push needs the hub, but HF_HUB_OFFLINE")
    without = rlt("push", "--data")
    assert without.returncode == 2
    [line] = without.stderr.splitlines()
    assert "rlt push takes one run, but got none: rlt push RUN [--data]" in line


def test_data_is_a_switch_with_or_without_a_value() -> None:
    for words in (["RUN", "--data"], ["--data", "RUN"], ["RUN", "--data", "true"], ["RUN", "--data=true"]):
        found = read_run([*words, "--repo_id", "a/b"])
        assert found[0] == "--run_dir=RUN"
        assert "true" in " ".join(found)
        assert found[-2:] == ["--repo_id", "a/b"]


def test_a_run_without_a_token_ends_before_it_trains(tmp_path: Path) -> None:
    options = [f"--output_dir={tmp_path}/run", "--export.push_to_hub=alice/teacher"]
    result = rlt(*QUICKSTART, *options, HF_HUB_OFFLINE="1")
    assert result.returncode == 2
    assert "A push needs the hub" in result.stderr
    assert not (tmp_path / "run" / "model").exists()
    result = rlt(*QUICKSTART, *options, "--export.enabled=false")
    assert "export.push_to_hub pushes model/, but export.enabled is false" in result.stderr


@pytest.mark.full
def test_a_finished_run_survives_a_failed_push(hub: FakeHub, tmp_path: Path) -> None:
    hub.refused["/api/models/alice/late/commit"] = 413
    options = [f"--output_dir={tmp_path}/run", "--export.push_to_hub=alice/late"]
    result = python(AT_HUB.format(url=hub.url, words=[*QUICKSTART, *options]), ROOT)
    assert result.returncode == 1, result.stderr
    [line] = [line for line in result.stderr.splitlines() if line.startswith("rlt: ")]
    assert f"The model is in {tmp_path}/run/model, but not on the hub." in line
    assert line.endswith(f"To push it: rlt push {tmp_path}/run")
    assert "Done: 2 steps." in result.stdout
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
