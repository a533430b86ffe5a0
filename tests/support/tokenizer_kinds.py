"""Tokenizers laid out like those of known families, trained on our own pages: real ones cannot be shipped.

llama2    <unk> <s> </s>, 256 bytes, pieces; runs of ▁; a line break is <0x0A>; a space before every text
mistral   the same with control tokens for instructions, and the space by Metaspace
gemma     many added tokens: unused ones, line breaks and spaces in runs, HTML tags; no space before texts
unigram   pieces with scores, control tokens and bytes among them
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from commands import ROOT
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

KINDS = ("llama2", "mistral", "gemma", "unigram")
SPACE = "\u2581"  # ▁
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PAGES = (
    "docs/method.md",
    "docs/pipeline.md",
    "docs/data.md",
    "research/finding.md",
    "docs/troubleshoot.md",
    "docs/extend.md",
)
OTHER_TEXT = (
    "数学，很有趣。証明する 물리 Привет, ação; def f(x):\n    return x ** 2\n\n\n        for i in y:\n\n"
    "\\frac{1}{2} \\begin{align} x_i^2 \\sum_{i=1}^{n} 👩🏽‍🏫 🧮 “x” don't … <h1>a</h1> <table></table>"
)
TEMPLATES = {
    "llama2": "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}<<SYS>>\n"
    "{{ m['content'] }}\n<</SYS>>\n\n{% elif m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}",
    "gemma": "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['role'] }}\n{{ m['content'] }}"
    "<end_of_turn>\n{% endfor %}<start_of_turn>model\n",
}


@cache
def kind_of_tokenizer(kind: str) -> Any:
    """Return the tokenizer of a kind."""
    backend = unigram() if kind == "unigram" else bpe(kind)
    bos, eos = ("<bos>", "<eos>") if kind == "gemma" else ("<s>", "</s>")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, unk_token="<unk>", pad_token=eos
    )
    fast.chat_template = TEMPLATES["gemma" if kind == "gemma" else "llama2"]
    return fast


def texts() -> list[str]:
    return [*((ROOT / page).read_text() for page in PAGES), *[OTHER_TEXT] * 20]


def trained(model: Any, trainer: Any) -> dict[str, Any]:
    """Train pieces within words, as sentencepiece does: no two digits and no line break in a piece."""
    tokenizer = Tokenizer(model)
    lines = pre_tokenizers.Split(Regex(r"\n+"), "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [lines, pre_tokenizers.Metaspace(prepend_scheme="never"), pre_tokenizers.Digits(True)]
    )
    tokenizer.train_from_iterator(texts(), trainer)
    described: dict[str, Any] = json.loads(tokenizer.to_str())
    return described


def bpe(kind: str) -> Tokenizer:
    described = trained(models.BPE(), trainers.BpeTrainer(vocab_size=1500, show_progress=False))
    model = described["model"]
    gemma, runs = kind == "gemma", [SPACE * n for n in range(2, 17)]
    controls = {
        "llama2": ["<unk>", "<s>", "</s>"],
        "mistral": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"],
        "gemma": ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<unused{n}>" for n in range(9)),
                  "<start_of_turn>", "<end_of_turn>"],
    }[kind]  # fmt: skip
    defined = ["\n" * n for n in range(2, 9)] + runs + ["<table>", "<h1>", "</h1>"] if gemma else []
    pieces = [*model["vocab"], *runs, *(["\n"] if gemma else [])]
    names = dict.fromkeys([*controls, *defined, *BYTES, *pieces])
    merges = [[SPACE * (n // 2), SPACE * (n - n // 2)] for n in range(2, 17)]
    model |= {"vocab": {name: i for i, name in enumerate(names)}, "merges": [*merges, *model["merges"]]}
    model |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    first = controls + defined
    described["added_tokens"] = [added(name, i, special=name in controls) for i, name in enumerate(first)]
    described["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(described))
    space = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "gemma":
        tokenizer.normalizer = space
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif kind == "llama2":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), space])
        steps += [decoders.Strip(" ", 1, 0)]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps += [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def unigram() -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=1200, show_progress=False, unk_token="<unk>")
    described = trained(models.Unigram(), trainer)
    pieces = [[name, score] for name, score in described["model"]["vocab"] if name != "<unk>"]
    controls = ["<unk>", "<s>", "</s>"]
    described["model"] |= {
        "vocab": [*([name, 0.0] for name in [*controls, *BYTES]), *pieces],
        "byte_fallback": True,
        "unk_id": 0,
    }
    described["added_tokens"] = [added(name, i, special=True) for i, name in enumerate(controls)]
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always"), decoders.Fuse()]
    )
    return tokenizer


def added(name: str, number: int, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": name, "special": special, **flags}
