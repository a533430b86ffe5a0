"""The miniatures can do what the finding needs, have two tokenizers that differ, and come from one script."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from arms import MINIATURES
from gates import measure_gates

from rlt_lightning.models.embedded import resolve
from rlt_lightning.models.load import load_model, load_tokenizer

SCRIPT = Path(__file__).parents[1] / "make_miniature.py"
QUESTION = "start 2, add 1, add 3, times 7?"
NAMES = {"miniature": "miniature", "teacher": "miniature-teacher", **MINIATURES}  # of models that load
SHA256 = {
    "seed1": "ea38c9ced96d3b865fc8d24ff25662c479effd563a660f14192dda0e429b22b3",
    "qwen2": "14da0f66cd27c5b6a54f64151e0ccb77e94268614fc59a6ed46ec5d5bcc8c3e7",
    "pieces": "21e5bf8a53f2967a40c81a8dc3259da29b3f457a6651665d16d020a6d909ebed",
}


def test_the_weights_are_those_that_were_made() -> None:
    weights = {name: Path(folder, "model.safetensors").read_bytes() for name, folder in MINIATURES.items()}
    assert {name: hashlib.sha256(some).hexdigest() for name, some in weights.items()} == SHA256


@pytest.mark.parametrize("name", NAMES)
def test_a_miniature_takes_steps_and_copies_leaps(name: str) -> None:
    found = measure_gates(load_model(NAMES[name]), load_tokenizer(NAMES[name]))
    assert found["step_accuracy"] > 0.99
    assert found["leaps_copied"] > 0.95


@pytest.mark.parametrize("name", ["miniature", "pieces"])
@pytest.mark.parametrize("text", [QUESTION, "<think>\n\n漢字 é 😀 12\t\\frac{1}{2}", "a<b> </think>x"])
def test_the_miniatures_tokenizers_keep_any_text(text: str, name: str) -> None:
    tokenizer = load_tokenizer(NAMES[name])
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_all_miniatures_but_one_have_one_tokenizer() -> None:
    text = QUESTION + "<think>\n 2 add"
    ids = [load_tokenizer(NAMES[name])(text)["input_ids"] for name in NAMES.keys() - {"pieces"}]
    assert all(some == ids[0] for some in ids)
    assert len(ids[0]) == 15


def test_the_miniature_in_pieces_divides_the_same_text_otherwise() -> None:
    found = {}
    for name in ("miniature", "pieces"):
        tokenizer = load_tokenizer(NAMES[name])
        ids = tokenizer("start 2, times 7?6 times 7 is 2.\n</think>")["input_ids"]
        found[name] = [tokenizer.decode([i]) for i in ids]
    assert found["miniature"] == [
        *("start", " 2", ",", " times", " 7", "?"),
        *("6", " times", " 7", " is", " 2", ".", "\n", "</think>"),
    ]
    assert found["pieces"] == [
        *("star", "t", " 2,", " time", "s", " 7?"),
        *("6", " time", "s", " 7", " is", " 2.\n", "</think>"),
    ]


@pytest.mark.full
def test_a_short_remake_takes_the_same_first_steps(tmp_path: Path) -> None:
    words = [sys.executable, SCRIPT, "--output_dir", tmp_path, "--stop_after", "5"]
    subprocess.run(words, check=True, capture_output=True)
    losses = [
        [json.loads(line)["loss"] for line in (folder / "pretraining.jsonl").read_text().splitlines()[:5]]
        for folder in (tmp_path, Path(resolve("miniature")))
    ]
    # Sums in another order, on another processor, change the last digits.
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), atol=1e-3, rtol=0)
