"""Fixtures: the real embedded model, and small real architectures that share its tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that reaches for the hub fails at once
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models are tiny, and threads that wait for each other are not

import pytest
import torch

SHARED = Path(__file__).parents[2] / "shared"


LONGEST = ("test_vllm_worker", "test_rank_failures", "test_configs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: two processes then end at about the same time."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


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
def miniature() -> str:
    """Folder of the embedded tiny model, pretrained on last-digit chains; `tiny.CHAINS` gives it its task."""
    from rlt_lightning.models.embedded import MINIATURES

    return str(MINIATURES["miniature"])


@pytest.fixture(scope="session")
def tiny_model(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a two-layer Llama with SmolLM2's tokenizer, random weights: 3 M parameters."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
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
    return str(folder)


@pytest.fixture(scope="session")
def runs(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of runs by strategy, made as they are asked for; final weights and metrics lie beside them."""
    from ranks import run

    class Runs(dict[str, Path]):
        def __missing__(self, strategy: str) -> Path:
            self[strategy] = tmp_path_factory.mktemp(strategy) / "run"
            run(tiny_model, self[strategy], strategy)
            return self[strategy]

    return Runs()
