"""Find a model's configuration without a network: in a folder, in the hub's cache, or among the known shapes.

name ─▶ local folder | miniature | cached by hub or package | known shape | what stage 1 trains ─▶ InputError
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from rlt_lightning.models.embedded import DEFAULT_MODEL, MINIATURES, WHEEL_SHA256, cache_folder
from rlt_lightning.run.shipped import shipped
from rlt_lightning.types import InputError

# The fields of each config.json that decide sizes, as the models' authors published them.
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "use_sliding_window": False, "max_position_embeddings": 32768, "dtype": "bfloat16",
}  # fmt: skip
QWEN3 = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "num_key_value_heads": 8,
}  # fmt: skip
QWEN2_7B = QWEN2 | {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-7B-Instruct": QWEN2_7B,
    "bespokelabs/Bespoke-Stratos-7B": QWEN2_7B,  # fine-tuned from the one above
    "Qwen/Qwen2.5-32B-Instruct": QWEN2 | {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-0.6B": QWEN3 | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-1.7B": QWEN3 | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    DEFAULT_MODEL: SMOLLM2_135M | {"dtype": "float32"},
    "HuggingFaceTB/SmolLM2-135M-Instruct": SMOLLM2_135M,
}  # fmt: skip


class Models:
    """Finds the folder of each model that a plan names.

    Args:
        scratch: An empty folder, for the configurations of known models.
        notes: Assumptions are added here.
    """

    def __init__(self, scratch: Path, notes: list[str]) -> None:
        self.scratch = scratch
        self.notes = notes

    def folder(self, name: str) -> str:
        """Return a folder on this machine that holds at least the model's config.json.

        Raises:
            InputError: If there is none. It never asks the hub or a package registry.
        """
        if name in MINIATURES:
            return str(MINIATURES[name])
        for place in (Path(name).expanduser(), *cached(name)):
            if (place / "config.json").is_file():
                return str(place)
        if name in KNOWN:
            return str(self.written(name))
        if (earlier := trained_by_config(name)) is not None:
            note = f"{name} does not exist yet: planned as {earlier}, which that run would train"
            if note not in self.notes:
                self.notes.append(note)
            return self.folder(earlier)
        raise InputError(
            f"rlt plan must know the shape of '{name}', but it is no folder with a config.json, not in the "
            f"hub's cache, and not among {', '.join(KNOWN)}. Download its config.json into a folder, and "
            "name the folder."
        )

    def written(self, name: str) -> Path:
        """Write the config.json of a known model; return its folder."""
        folder = self.scratch / name.replace("/", "--")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(KNOWN[name]))
        return folder

    def has_tokenizer(self, name: str) -> bool:
        """Tell whether the model's tokenizer lies on this machine."""
        return (Path(self.folder(name)) / "tokenizer.json").is_file()


def cached(name: str) -> list[Path]:
    """Return the folders in which an earlier download may have left a model."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if name == DEFAULT_MODEL:
        return [cache_folder() / f"{DEFAULT_MODEL}-{WHEEL_SHA256[:12]}"]
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # a path, no hub id
        return []
    return [Path(found).parent] if isinstance(found, str) else []


def trained_by_config(name: str) -> str | None:
    """Return the model that a shipped config trains, of a run folder that is named after the config.

    `runs/quickstart_smollm2_warmup/model` is smollm2-135m: the config quickstart_smollm2_warmup names it.
    """
    folder = Path(name)
    config = shipped().get(folder.parent.name)
    if folder.name != "model" or config is None:
        return None
    settings = yaml.safe_load(config.read_text()).get("model", {}).get("init_args", {})
    trained = settings.get("teacher") or settings.get("pretrained")
    return trained if trained != name else None
