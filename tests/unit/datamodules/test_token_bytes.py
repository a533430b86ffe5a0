"""Tokens decode to exact bytes, and texts survive tokenising, with tokenizers of several families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from miniatures import PIECES
from tokenizer_kinds import KINDS, kind_of_tokenizer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlt_lightning.datamodules.cross_tokenizer import ByteExactTokenizer, repair_text
from rlt_lightning.models.load import load_tokenizer
from rlt_lightning.types import InputError

TEXTS = [
    "",
    "So x = 12345.\n\n",
    "  two spaces, a\ttab\r\n and 3.14e-5",
    "数学，很有趣。\n証明 👩🏽‍🏫🧮",
    r"\frac{\partial f}{\partial x} = \sum_{i=1}^{n} x_i^2",
    "def f(x):\n    return x ** 2  # ▁ is no space here",
    "e\u0301 decomposed, \ufb01 ligature, \u2126 ohm, \u00a0 no break, \u200b nothing",
    "Ġ Ċ â are characters too; so are <0x0A> and \ufffd",
]
CONTROLS = "a<|im_end|><|endoftext|></s><s><think>x</think><|begin_of_thought|><tool_call>b<pad><unk>"


def fast(tokenizer: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def llama3(smollm2: str) -> Any:
    """SmolLM2's words in Llama 3's way: whole words first, control tokens among the words."""
    described = json.loads((Path(smollm2) / "tokenizer.json").read_text())
    described["model"]["ignore_merges"] = True
    described["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
    described["pre_tokenizer"]["use_regex"] = False
    return fast(Tokenizer.from_str(json.dumps(described)))


FAMILIES = ("smollm2", "qwen", "think", "miniature", "miniature-pieces", *KINDS, "llama3")


@pytest.fixture(scope="module", params=FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    match request.param:
        case "smollm2" | "miniature":
            return AutoTokenizer.from_pretrained(request.getfixturevalue(request.param))
        case "miniature-pieces":
            return load_tokenizer(PIECES)
        case "qwen":
            return request.getfixturevalue("qwen")
        case "think":
            loaded = AutoTokenizer.from_pretrained(request.getfixturevalue("smollm2"))
            loaded.add_tokens(["<think>", "</think>", AddedToken("<pad>", special=True)])
            return loaded
        case "llama3":
            return llama3(request.getfixturevalue("smollm2"))
    return kind_of_tokenizer(request.param)


def test_tokens_have_exactly_the_bytes_of_a_text(tokenizer: Any) -> None:
    plain = ByteExactTokenizer(tokenizer, "student")
    for text in [*TEXTS, CONTROLS]:
        ids, ends = plain.encode(text)
        pieces = [plain.decode_bytes(token_id) for token_id in ids]
        # A tokenizer with ▁ for a space reads the character ▁ as one.
        read = text if plain.is_byte_level else text.replace("▁", " ")
        assert b"".join(pieces).decode() == read
        assert ends == sorted(ends)
        assert ends[-1:] == ([len(text.encode())] if text else [])
        assert all(0 <= token_id < len(tokenizer) for token_id in ids)


def test_no_text_becomes_a_control_token(tokenizer: Any) -> None:
    plain = ByteExactTokenizer(tokenizer, "student")
    backend = tokenizer.backend_tokenizer
    decoder = backend.get_added_tokens_decoder()
    controls = {i for i, token in decoder.items() if not token.content.replace("▁", " ").isspace()}
    spelled = [backend.id_to_token(i) for i in controls]
    for text in [CONTROLS, *spelled, "".join(spelled), "x".join(spelled)]:
        assert controls.isdisjoint(plain.encode(text)[0])
        assert controls.isdisjoint(plain.encode("So", text)[0])
    # The tokenizer itself would make some of them.
    assert not controls.isdisjoint(tokenizer("".join(spelled), add_special_tokens=False)["input_ids"])


def test_added_white_space_stays_a_token() -> None:
    gemma = kind_of_tokenizer("gemma")
    plain = ByteExactTokenizer(gemma, "student")
    ids, _ = plain.encode("a\n\nif b:\n    c")
    assert gemma.convert_ids_to_tokens(ids)[1] == "\n\n"
    assert gemma.convert_ids_to_tokens(ids)[-2:] == ["▁▁▁▁", "c"]
    # As a teacher's token it is four spaces, not four of the character ▁.
    text, ends = plain.decode_text(ids)
    assert text == "a\n\nif b:\n    c"
    assert ends[:2] + ends[-2:] == [1, 3, 13, 14]


def test_only_the_name_of_a_byte_is_spelled_by_characters() -> None:
    # A unigram tokenizer takes "<0x0A>" in a text for a line break.
    unigram = kind_of_tokenizer("unigram")
    plain = ByteExactTokenizer(unigram, "student")
    before, name, after = (plain.encode(text)[0] for text in ("the teacher", "<0x0A>", " and of the teacher"))
    assert len(before) <= 4
    assert unigram.convert_ids_to_tokens(name) == list("<0x0A>")
    assert plain.encode("the teacher<0x0A> and of the teacher")[0] == before + name + after


def test_what_the_teacher_wrote_is_its_tokens_bytes(smol: Any) -> None:
    plain = ByteExactTokenizer(smol, "teacher")
    ids = smol("So <|im_start|> 🧮!", add_special_tokens=False)["input_ids"]
    assert smol.convert_tokens_to_ids("<|im_start|>") in ids  # sampled as a control token
    assert plain.decode_text(ids)[0] == "So <|im_start|> 🧮!"
    missing = 10**6  # no such token
    assert plain.decode_text([*ids, missing])[1][-2:] == [len("So <|im_start|> 🧮!".encode())] * 2


def test_line_breaks_are_tokenised_as_before_what_follows(smol: Any) -> None:
    plain = ByteExactTokenizer(smol, "student")
    alone, before_tag = plain.encode("So\n\n")[0], plain.encode("So\n\n", "<|end_of_thought|>")[0]
    assert len(alone) == 2 < len(before_tag) == 3
    # A token that would hold parts of both: "=" and "<".
    assert plain.encode("a<", "=b") == plain.encode("a<")


def test_characters_without_tokens_are_replaced(smol: Any) -> None:
    plain = ByteExactTokenizer(smol, "student")
    with pytest.raises(InputError, match="must have the bytes of every text"):
        plain.encode("a\x13b")
    # a │ \x13 │ b: U+FFFD has 3 bytes. \U00050000 has 4, of which the first two are one token.
    assert plain.spellable("a\x13b", [1, 2, 3]) == ("a\ufffdb", [1, 4, 5])
    assert plain.spellable("a\U00050000b", [1, 3, 5, 6]) == ("a\ufffdb", [1, 4, 4, 5])
    assert plain.spellable("ab\n", [3]) == ("ab\n", [3])


def test_bytes_that_are_no_character_become_one() -> None:
    # x, a lone continuation byte, y, half of 数, z: both become U+FFFD, 3 bytes each.
    data = b"x\x80y\xe6\x95z"
    assert repair_text(data, [1, 2, 3, 4, 5, 6]) == ("x\ufffdy\ufffdz", [1, 4, 5, 8, 8, 9])
    assert repair_text(data, [1, 2, 3, 4, 5, 6])[0] == data.decode(errors="replace")


@pytest.mark.parametrize("kind", ["words", "lost_spaces", "no_bytes"])
def test_a_tokenizer_whose_bytes_are_unknown_is_refused(kind: str) -> None:
    if kind == "words":
        tokenizer = Tokenizer(models.WordPiece({"<unk>": 0, "So": 1, "##x": 2, "</s>": 3}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        described = json.loads(kind_of_tokenizer("llama2").backend_tokenizer.to_str())
        if kind == "lost_spaces":
            described |= {"normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}}
        else:
            described["model"]["byte_fallback"] = False
        tokenizer = Tokenizer.from_str(json.dumps(described))
    with pytest.raises(InputError, match=r"A student whose tokenizer is not .* must have tokens"):
        ByteExactTokenizer(fast(tokenizer), "student")
