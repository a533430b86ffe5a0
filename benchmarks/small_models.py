"""Make small models with random weights and the embedded model's tokenizer, for runs at tiny size.

benchmarks/small_models.py FOLDER [--tokenizer FOLDER] [--tiny]   makes FOLDER/teacher and FOLDER/student
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

NUM_WORDS = 49152  # of SmolLM2


def make_model(folder: Path, hidden_size: int, num_layers: int, seed: int, tokenizer: str) -> str:
    """Write a Qwen2 with random weights to a folder, with heads of 64 dimensions."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=NUM_WORDS,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=2 if hidden_size % 128 == 0 else 1,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", help="folder of a tokenizer; else the embedded model's, fetched once")
    parser.add_argument("--tiny", action="store_true", help="a size that shows only that a run works")
    options = parser.parse_args()
    tokenizer = options.tokenizer
    if tokenizer is None:
        from rlt_lightning.models.embedded import embedded_model

        tokenizer = str(embedded_model())
    teacher_size, student_size, num_layers = (64, 128, 1) if options.tiny else (256, 384, 4)
    make_model(options.folder / "teacher", teacher_size, num_layers, 0, tokenizer)
    make_model(options.folder / "student", student_size, num_layers, 1, tokenizer)


if __name__ == "__main__":
    main()
