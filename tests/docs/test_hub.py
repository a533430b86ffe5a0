"""`export.repo_id` against a fake hub: what arrives, what is refused and what a failure leaves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ROOT, python, rlt
from fake_hub import FakeHub, faults, header_of
from huggingface_hub import constants
from huggingface_hub.utils import close_session
from tiny import QUICKSTART
from trainers import bare_trainer

from rlt_lightning.callbacks.export import ModelExporter
from rlt_lightning.checkpoints.card import inherited_header, write_model_card

TOKEN = "hf_alicesTokenThatMayWrite"
USERS = {TOKEN: "alice", "hf_bobsOwnToken": "bob"}
FACTS = {"pretrained": "Qwen/Qwen2.5-7B-Instruct", "lora": None, "training": {"method": "SFTModule"}}

# In a process that has the client imported, which read its environment then.
AT_HUB = """
from huggingface_hub import constants
import sys
from rlt_lightning.__main__ import main
constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = {url!r}, False, True
sys.argv = ["rlt", *{words!r}]
main()
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that this process and its children use, with its token in the environment."""
    with FakeHub(USERS) as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        close_session()
        yield found
    close_session()


def test_a_run_uploads_its_model_at_its_end(hub: FakeHub, tmp_path: Path) -> None:
    options = [f"--output_dir={tmp_path}/run", "--export.repo_id=alice/teacher"]
    result = python(AT_HUB.format(url=hub.url, words=[*QUICKSTART, *options]), ROOT, HF_TOKEN=TOKEN)
    assert result.returncode == 0, result.stderr
    repo, printed = hub.repos["model", "alice/teacher"], result.stdout + result.stderr
    assert f"{tmp_path}/run/model is on the hub: {hub.url}/alice/teacher" in printed
    assert repo.private
    local = {path.name: path.read_bytes() for path in (tmp_path / "run" / "model").iterdir()}
    assert repo.files.items() >= local.items()
    assert repo.files.keys() - local.keys() == {".gitattributes"}
    card = repo.files["README.md"].decode()
    assert "| solution term | -" in card
    assert str(tmp_path) not in card
    assert faults(card) == []
    # Before the first model was loaded.
    assert hub.requests.index("POST /api/repos/create") < len(hub.requests) // 2
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in content for content in (*written, *repo.files.values()))
    assert TOKEN not in printed + "".join(hub.requests)


@pytest.mark.full
def test_two_ranks_upload_once(hub: FakeHub, tmp_path: Path) -> None:
    options = [f"--output_dir={tmp_path}/run", "--export.repo_id=alice/two", "--trainer.devices=2"]
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    result = rlt(*QUICKSTART, *options, fresh=True, HF_TOKEN=TOKEN, **environment)
    assert result.returncode == 0, result.stderr
    assert len(hub.repos["model", "alice/two"].commits) == 2


def test_weights_of_an_earlier_model_are_deleted(hub: FakeHub, finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    repo = hub.put("alice/m", {"model-00001-of-00002.safetensors": "old", "NOTES.md": "mine"}, private=True)
    exporter = ModelExporter(repo_id="alice/m")
    exporter.has_written = True
    exporter.teardown(bare_trainer(tmp_path / "run"), None, "fit")  # type: ignore[arg-type]
    assert not exporter.upload_failed
    assert "model-00001-of-00002.safetensors" not in repo.files
    assert "model.safetensors" in repo.files
    assert repo.files["NOTES.md"] == b"mine"


def test_a_model_inherits_base_and_licence_of_a_local_one(tmp_path: Path) -> None:
    assert inherited_header("Qwen/Qwen2.5-7B-Instruct") == {"base_model": "Qwen/Qwen2.5-7B-Instruct"}
    assert inherited_header("smollm2-135m")["license"] == "apache-2.0"
    assert inherited_header(str(tmp_path)) == {}
    (tmp_path / "README.md").write_text(write_model_card(FACTS))
    assert inherited_header(str(tmp_path)) == {"base_model": "Qwen/Qwen2.5-7B-Instruct"}
    second = write_model_card(FACTS | {"pretrained": str(tmp_path)})
    assert header_of(second)["base_model"] == "Qwen/Qwen2.5-7B-Instruct"
    assert faults(second) == []
    (tmp_path / "README.md").write_text("---\n- no mapping\n---\n")
    assert inherited_header(str(tmp_path)) == {}


def test_a_run_that_may_not_upload_ends_before_it_trains(hub: FakeHub, tmp_path: Path) -> None:
    words = [*QUICKSTART, f"--output_dir={tmp_path}/run", "--export.repo_id=bob/teacher"]
    refused = python(AT_HUB.format(url=hub.url, words=words), ROOT, HF_TOKEN=TOKEN)
    offline = rlt(*words, HF_HUB_OFFLINE="1")
    for result in (refused, offline):
        assert result.returncode == 2, result.stderr
        [line] = result.stderr.strip().splitlines()
        assert "export.repo_id must be a repository to which you may write, but bob/teacher is not" in line
    assert not (tmp_path / "run" / "model").exists()
    assert "export.enabled is false" in rlt(*words, "--export.enabled=false").stderr


def test_a_finished_run_survives_a_failed_upload(hub: FakeHub, tmp_path: Path) -> None:
    hub.refused["/api/models/alice/late/commit"] = 413
    options = [f"--output_dir={tmp_path}/run", "--export.repo_id=alice/late"]
    result = python(AT_HUB.format(url=hub.url, words=[*QUICKSTART, *options]), ROOT, HF_TOKEN=TOKEN)
    assert result.returncode == 1, result.stderr
    [line] = [line for line in result.stderr.splitlines() if "The model is in" in line]
    assert f"The model is in {tmp_path}/run/model, but not on the hub (" in line
    assert line.endswith(f"To upload it: hf upload alice/late {tmp_path}/run/model .")
    assert "Done: 2 steps." in result.stdout
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
