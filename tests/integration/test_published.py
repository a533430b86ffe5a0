"""Published checkpoints: tiny folders laid out like RLT-7B and Bespoke-Stratos-7B, with Qwen2.5's tokenizer.

The commands of docs/reproduce.md for such models are run on them: evaluate, chat, score, continue training.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from commands import ROOT, run_rlt
from tiny import tiny_options

from rlt_lightning.models.load import load_tokenizer

QUESTION = "What is 3 + 4?"
TEACHER_PROMPT = (
    "Explain the given solution.\n"  # stands for the released one, which the user gives in a file
)


@pytest.fixture(scope="module")
def published(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Qwen2 in bfloat16 with the files of SakanaAI/RLT-7B: shards, sampling defaults, no format."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("published") / "RLT-7B"
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=152064,  # more rows than the tokenizer has words
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32768,
        bos_token_id=151643,
        eos_token_id=151645,
        tie_word_embeddings=False,
        use_cache=False,
        dtype=torch.bfloat16,
    )
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        repetition_penalty=1.05,
        eos_token_id=[151645, 151643],
    )
    model.save_pretrained(folder, max_shard_size="8MB")
    for path in (shared / "data/tokenizers/Qwen2.5-Instruct").iterdir():
        shutil.copy(path, folder)
    # The trainer of the original left a pickle, which nobody may load.
    (folder / "training_args.bin").write_bytes(b"\x80\x04K\x00.")
    (folder / "README.md").write_text("---\nbase_model: Qwen/Qwen2.5-7B-Instruct\n---\n")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert (folder / "model.safetensors.index.json").exists()
    return str(folder)


@pytest.fixture(scope="module")
def rows(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows as Bespoke-Stratos-17k has them; the hub id stands in their place in docs."""
    path = tmp_path_factory.mktemp("rows") / "stratos.jsonl"
    with (shared / "data/stratos_format/gsm8k_train.jsonl").open() as file:
        path.write_text("".join(next(file) for _ in range(4)))
    return str(path)


def read_prompt(rows: str) -> str:
    """Return the system prompt that the published student was trained with."""
    return str(json.loads(Path(rows).read_text().splitlines()[0])["system"])


def run(*words: str, text: str | None = None) -> str:
    """Run a command; return its standard output. It must not warn of an unknown format."""
    result = run_rlt(*words, **({} if text is None else {"text": text}))
    assert "does not record the format" not in result.stderr
    return str(result.stdout)


def config(name: str, verb: str, model: str, *options: str) -> list[str]:
    """A shipped config at tiny size on these models."""
    settings = yaml.safe_load((ROOT / "configs" / name).read_text())
    words = [verb, f"--config=configs/{name}", *tiny_options(verb, settings, model), *options]
    return words if verb == "test" else [*words, "--trainer.strategy=auto", "--trainer.callbacks=null"]


def test_a_published_student_is_evaluated_as_it_was_trained(
    published: str, rows: str, tmp_path: Path
) -> None:
    question = {"question": QUESTION, "answer": "7"}
    (tmp_path / "set.jsonl").write_text(json.dumps(question))
    words = config(
        "recipe_7b/evaluate.yaml", "test", published, f"--data.student_system_prompt={read_prompt(rows)}"
    )
    sets = json.dumps({"own": str(tmp_path / "set.jsonl")})
    run(*words, f"--data.sets={sets}", f"--output_dir={tmp_path / 'run'}")
    prompt = json.loads((tmp_path / "run/evaluation.json").read_text())["sets"]["own"]["prompt"]
    chat = [{"role": "system", "content": read_prompt(rows)}, {"role": "user", "content": QUESTION}]
    tokenizer = load_tokenizer(published)
    assert prompt == tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


@pytest.mark.full
@pytest.mark.parametrize("name", ["recipe_7b/sft.yaml"])
def test_training_continues_from_a_published_student(
    name: str, published: str, rows: str, tmp_path: Path
) -> None:
    options = ["--data.max_bad_frac=1.0", f"--data.source={rows}", f"--output_dir={tmp_path / 'run'}"]
    run(*config(name, "fit", published), *options)
    record = json.loads((tmp_path / "run/model/rlt_format.json").read_text())
    assert record["role"] == "student"
    assert record["system_prompt"] == read_prompt(rows)
    assert not (tmp_path / "run/model/training_args.bin").exists()


@pytest.mark.full
def test_stage_2_continues_from_a_released_teacher(published: str, rows: str, tmp_path: Path) -> None:
    options = [f"--data.teacher_system_prompt={TEACHER_PROMPT.strip()}"]
    options += [f"--data.student_system_prompt={read_prompt(rows)}"]
    options += [f"--data.source={rows}", f"--output_dir={tmp_path / 'run'}"]
    run(*config("recipe_7b/rlt.yaml", "fit", published), *options)
    record = json.loads((tmp_path / "run/model/rlt_format.json").read_text())
    assert (record["role"], record["system_prompt"]) == ("teacher", TEACHER_PROMPT.strip())
