"""Find the models of a plan, and what their weights and activations take, without loading them.

The configuration comes from this machine, never from a network:

    name ─▶ local folder | miniature | cached by hub or package | known shape | what stage 1 trains ─▶ error

Activations are not guessed: the model's own forward and backward run on fake tensors, which have shapes but
no memory, and the bytes of the real tensors are added up.
"""

from __future__ import annotations

import copy
import json
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlt_lightning.models.embedded import DEFAULT_MODEL, MINIATURES, WHEEL_SHA256, cache_folder
from rlt_lightning.models.kernels import find_blocks
from rlt_lightning.models.packed import disable_dropout, scored_hidden_states
from rlt_lightning.modules.phases import list_heads
from rlt_lightning.numerics.packing import PackedSequences, ScoredSequence
from rlt_lightning.run.shipped import list_shipped_configs
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

    def find_folder(self, name: str) -> str:
        """Return a folder on this machine that holds at least the model's config.json.

        Raises:
            InputError: If there is none. It never asks the hub or a package registry.
        """
        if name in MINIATURES:
            return str(MINIATURES[name])
        for place in (Path(name).expanduser(), *find_cached(name)):
            if (place / "config.json").is_file():
                return str(place)
        if name in KNOWN:
            return str(self.write_config(name))
        if (earlier := find_trained_model(name)) is not None:
            note = f"{name} does not exist yet: planned as {earlier}, which that run would train"
            if note not in self.notes:
                self.notes.append(note)
            return self.find_folder(earlier)
        raise InputError(
            f"rlt plan must know the shape of '{name}', but it is no folder with a config.json, not in the "
            f"hub's cache, and not among {', '.join(KNOWN)}. Download its config.json into a folder, and "
            "name the folder."
        )

    def write_config(self, name: str) -> Path:
        """Write the config.json of a known model; return its folder."""
        folder = self.scratch / name.replace("/", "--")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(KNOWN[name]))
        return folder

    def has_tokenizer(self, name: str) -> bool:
        """Tell whether the model's tokenizer lies on this machine."""
        return (Path(self.find_folder(name)) / "tokenizer.json").is_file()


def find_cached(name: str) -> list[Path]:
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


def find_trained_model(name: str) -> str | None:
    """Return the model that a shipped config trains, of a run folder that is named after the config.

    `runs/quickstart_smollm2_warmup/model` is smollm2-135m: the config quickstart_smollm2_warmup names it.
    """
    folder = Path(name)
    config = list_shipped_configs().get(folder.parent.name)
    if folder.name != "model" or config is None:
        return None
    settings = yaml.safe_load(config.read_text()).get("model", {}).get("init_args", {})
    trained = settings.get("teacher") or settings.get("pretrained")
    return trained if trained != name else None


@dataclass(frozen=True)
class Shape:
    """Numbers of a model's weights, and of its keys and values per token."""

    weights: int  # in all; tied weights count once
    trained: int  # in the optimizer
    block: int  # in the largest transformer block
    num_blocks: int
    outside: int  # outside the blocks: embedding, last norm, head
    largest: int  # in the largest tensor
    largest_trained: int  # in the largest tensor of the optimizer
    hidden_size: int
    num_words: int  # of the head
    head_trained: int  # in the head's gradient; 0 if the head is frozen
    kv_per_token: int  # keys and values of all layers

    @classmethod
    def from_model(cls, model: Any) -> Shape:
        """Count the weights of a model, which may be on the meta device."""
        config, head = model.config.get_text_config(), model.get_output_embeddings()
        per_block = [sum(p.numel() for p in block.parameters()) for block in find_blocks(model)]
        sizes = [p.numel() for p in model.parameters()]
        trained = [p.numel() for p in model.parameters() if p.requires_grad]
        layers = list_heads(config)
        kv_heads = getattr(config, "num_key_value_heads", None)
        return cls(
            weights=sum(sizes),
            trained=sum(trained),
            block=max(per_block),
            num_blocks=len(per_block),
            outside=sum(sizes) - sum(per_block),
            largest=max(sizes),
            largest_trained=max(trained),
            hidden_size=config.hidden_size,
            num_words=head.out_features,
            head_trained=head.weight.numel() if head.weight.requires_grad else 0,
            kv_per_token=sum(2 * (kv_heads or heads) * size for heads, size in layers),
        )


@dataclass(frozen=True)
class Activations:
    """Bytes of one row of tokens in the transformer, without embedding and head."""

    kept: int  # from the forward to the backward pass
    copies: int  # weights in half precision, which autocast keeps for a whole step
    backward: int  # added by one block's backward at its peak, recomputed activations included
    forward: int  # peak of a forward without gradient


def trace_activations(
    model: Any, num_tokens: int, prefix: int = 0, checkpointing: bool = False, autocast: bool = False
) -> Activations:
    """Trace a row of tokens through one block and through two; further blocks need what the second needs.

    The trace uses the CPU's kernels, whose flash attention keeps what a GPU's keeps. Gradients of weights
    exist from the start, as they do from the second row of a step on.

    Args:
        model: The model, on the meta device; it is not changed.
        num_tokens: Tokens of the row.
        prefix: Tokens of the row that all sequences share; 0: two sequences that share nothing.
        checkpointing: Whether blocks are computed again in the backward pass.
        autocast: Whether products are in bfloat16.
    """
    sequences = [
        ScoredSequence([0] * prefix, rest, score_last(prefix + len(rest)))
        for rest in split_in_halves(num_tokens - prefix)
    ]
    family = tuple(range(len(sequences)))
    families = (family,) if prefix else tuple((i,) for i in family)
    packed = PackedSequences.from_sequences(sequences, families)
    kept: list[int] = []
    for number in (1, 2):
        small = keep_first_blocks(model, number)
        if checkpointing:
            small.gradient_checkpointing_enable({"use_reentrant": False})
        precision = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        with FakeTensorMode(allow_non_fake_inputs=True), precision:
            small.to_empty(device="cpu")
            # The gradient of the embedding is counted elsewhere.
            small.get_input_embeddings().weight.requires_grad_(False)
            for parameter in small.parameters():
                parameter.grad = torch.empty_like(parameter)
            with LiveBytes(small) as live, torch.no_grad():
                scored_hidden_states(small, packed)
            forward = live.peak
            torch.clear_autocast_cache()
            with LiveBytes(small) as live:
                hidden = scored_hidden_states(small, packed)
                kept.append(live.now)
                live.peak = live.now
                hidden.backward(torch.empty_like(hidden))
            backward = live.peak - kept[-1]
    cast = [p for p in find_blocks(model)[0].parameters() if p.dim() > 1 and p.dtype == torch.float32]
    copied = 2 * sum(p.numel() for p in cast if p.requires_grad) if autocast else 0
    num_blocks = len(find_blocks(model))
    return Activations(
        kept=kept[0] - copied + (num_blocks - 1) * (kept[1] - kept[0] - copied),
        copies=num_blocks * copied,
        backward=backward,
        forward=forward,
    )


class LiveBytes(TorchDispatchMode):
    """Adds up the memory of live tensors, without the model's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in tensors if tensor is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note its results."""
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                self.note(tensor.untyped_storage())
        return results

    def note(self, storage: torch.UntypedStorage) -> None:
        """Count new memory until it is freed."""
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += self.sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, key)

    def forget(self, key: int) -> None:
        """Take off memory that was freed."""
        self.now -= self.sizes.pop(key)


def keep_first_blocks(model: Any, number: int) -> Any:
    """Return a copy of a model with only its first blocks, in training mode and without dropout."""
    first = find_blocks(model)[0]
    parent, name, all_blocks = next(
        (module, name, child)
        for module in model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and child[0] is first
    )
    setattr(parent, name, all_blocks[:number])
    try:
        small = copy.deepcopy(model).train()
    finally:
        setattr(parent, name, all_blocks)
    disable_dropout(small)
    return small


def split_in_halves(num_tokens: int) -> list[list[int]]:
    """Split tokens into two sequences, or into one if they are few."""
    sizes = (num_tokens // 2, num_tokens - num_tokens // 2) if num_tokens > 3 else (num_tokens,)
    return [[0] * size for size in sizes]


def score_last(num_tokens: int) -> list[bool]:
    """Return a mask that scores only the last token: the head's part is counted elsewhere."""
    return [False] * (num_tokens - 1) + [True]
