"""Models and tokenizers by name: SmolLM2-135M, a miniature, a local folder, or a hub id."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from rlt_lightning.models.attention import SEGMENT_ATTENTION, register_segment_attention, supports_sdpa
from rlt_lightning.models.embedded import (
    DEFAULT_MODEL,
    MINIATURES,
    MODEL_CHOICES,
    find_file,
    quiet_transformers,
    resolve,
)
from rlt_lightning.models.file_names import PretrainedFiles
from rlt_lightning.models.format import FORMAT_FILE, ModelFormat, without_default_system
from rlt_lightning.models.packed import LIMITS
from rlt_lightning.models.template import fix_date
from rlt_lightning.models.weights import Read, WeightFiles, require_weights
from rlt_lightning.run.console import announce
from rlt_lightning.run.digests import SUFFIX, read_digests, require_digests
from rlt_lightning.types import InputError, first_line

# Tokenizers differ in digits, apostrophes, line breaks, tags, scripts, and composed and decomposed letters.
PROBE = (
    "<think>\nOkay, 12345 + 678 = 13,023.\n\n</think>\n\n<|begin_of_solution|>  x=2024;\tdef f():\n"
    "    return y\r\ndon't DON'T we'll “so” Straße İstanbul ılık ﬁx café cafe\u0301 \u2126 \u00a0\u3000"
    "数学，한국어 ภาษา 👩🏽\u200d🏫🧮 \n \n"
)

# `from_pretrained` patches transformers while it loads: of two threads at once, one would not tie its head.
LOADING = threading.Lock()
Dtype = Literal["float32", "bfloat16", "float16", "auto"]


def load_tokenizer(name: str, trust_remote_code: bool = False, chat_template: Any = None) -> Any:
    """Load the fast tokenizer of a model.

    Args:
        name: See `load_model`.
        trust_remote_code: Run code that comes with the tokenizer.
        chat_template: The template of a run; None: the model's, as it was before our training, with the date
            `DATE` where it prints one (`fix_date`).

    Raises:
        InputError: If nothing can be loaded under that name, or its tokenizer has no chat template.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with naming_choices("tokenizer", name):
        tokenizer = AutoTokenizer.from_pretrained(resolve(name), trust_remote_code=trust_remote_code)
        # Every other class makes a normalizer and pre-tokenizer, whatever tokenizer.json says.
        if type(tokenizer) is not PreTrainedTokenizerFast and find_file(name, "tokenizer.json"):
            plain = PreTrainedTokenizerFast.from_pretrained(resolve(name))
            if not (tokenizer.is_fast and reads_alike(tokenizer, plain)):
                tokenizer = plain
    if chat_template is not None:
        tokenizer.chat_template = chat_template
        return tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"The tokenizer of '{name}' must have a chat template, but has none. Use an instruction-tuned "
            "model, or put a chat_template.jinja into its folder."
        )
    # Our prompts say whether there is a system message; see `models.format`.
    tokenizer.chat_template = fix_date(without_default_system(tokenizer.chat_template), name)
    return tokenizer


def reads_alike(tokenizer: Any, plain: Any) -> bool:
    """Return whether two tokenizers read `PROBE`, words of the vocabulary and the added tokens alike."""
    words = plain.batch_decode([[token_id] for token_id in range(0, len(plain), len(plain) // 500 + 1)])
    texts = [PROBE, "\n".join(words), "x".join(plain.get_added_vocab())]
    ids, others = (
        [reader(texts, add_special_tokens=adds, verbose=False)["input_ids"] for adds in (False, True)]
        for reader in (tokenizer, plain)
    )
    return bool(ids == others and tokenizer.decode(ids[0][0]) == plain.decode(ids[0][0]))


def load_format(name: str) -> ModelFormat | None:
    """Return the format that a model folder or a hub repository records; None for a model from outside.

    Raises:
        InputError: If the record is not as it was written.
    """
    require_model_name(name)
    path = find_file(name, FORMAT_FILE)
    if path is None:
        return None
    return ModelFormat.from_plain(path.read_bytes(), str(path))


def load_model(
    name: str,
    dtype: str = "float32",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    role: str = "",
) -> Any:
    """Load a causal language model in evaluation mode, on the default device.

    Lightning makes the GPU the default device inside `configure_model`; elsewhere it is the CPU.

    Args:
        name: Local folder, hub id, or a name such as miniature.
        dtype: "float32", "bfloat16", "float16", or "auto" for what the checkpoint holds.
        attn_implementation: "sdpa", "eager", "flash_attention_2"; None: ours, which shares prefixes, or
            transformers' choice for a model whose windows or caps ours does not support.
        trust_remote_code: Run code that comes with the model. Off unless you trust its author.
        role: What the model is for, in the line that announces it.

    Raises:
        InputError: If nothing can be loaded under that name, or its files lack a weight of the model.
    """
    from transformers import AutoModelForCausalLM

    config = model_config(name, trust_remote_code)
    options = attention_options(name, attn_implementation, trust_remote_code, config)
    announce_model(name, dtype, role)
    require_intact(Path(resolve(name)), weights=True)
    with LOADING, naming_choices("model", name), quiet_transformers():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            resolve(name),
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            # Never unpickle a stranger's file.
            use_safetensors=True,
            # What is missing or has another shape would be drawn at random.
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **options,
        )
    model, loading = loaded
    require_weights(name, loading["missing_keys"] | {key for key, *_ in loading["mismatched_keys"]})
    return model


def empty_model(
    name: str, dtype: str = "float32", attn_implementation: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, Read]:
    """Build the model that `load_model` would load, with empty parameters on the meta device.

    Returns:
        The model, and a function that reads the value of a parameter or persistent buffer by its name.

    Raises:
        InputError: As `load_model`.
    """
    from transformers import GenerationConfig

    require_intact(Path(resolve(name)), weights=True)
    model = meta_model(name, dtype, attn_implementation, trust_remote_code)
    if model.can_generate():
        with quiet_transformers(), contextlib.suppress(OSError):  # there is none
            model.generation_config = GenerationConfig.from_pretrained(resolve(name))
    return model, PretrainedFiles(model, WeightFiles(name))


def meta_model(
    name: str,
    dtype: str = "float32",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    config: Any = None,
) -> Any:
    """Build a model from its configuration only: parameters on the meta device, no weights needed.

    Args:
        name: See `load_model`, as for all arguments but the last.
        dtype: Type of its weights.
        attn_implementation: Its attention.
        trust_remote_code: Run code that comes with it.
        config: The configuration; None: that of its name.

    Raises:
        InputError: As `load_model`.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = config or model_config(name, trust_remote_code)
    options = attention_options(name, attn_implementation, trust_remote_code, config)
    with naming_choices("model", name), quiet_transformers():
        dtype_found = config.dtype if dtype == "auto" else getattr(torch, dtype)
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype_found, **options)
        # Building registered tied weights as separate empty ones.
        model.tie_weights()
        return model


def attention_options(
    name: str, attn_implementation: str | None, trust_remote_code: bool, config: Any
) -> dict[str, Any]:
    """Return the options about attention and remote code with which transformers loads a model."""
    register_segment_attention()
    ours_fits = can_replace_attention(config)
    if attn_implementation is None and ours_fits:
        attn_implementation = SEGMENT_ATTENTION
    if attn_implementation is None and getattr(config.get_text_config(), "attn_logit_softcapping", None):
        attn_implementation = "eager"  # transformers' sdpa leaves the cap out, as Gemma 2 has it
    if attn_implementation == SEGMENT_ATTENTION and not ours_fits:
        raise InputError(
            f"attn_implementation '{SEGMENT_ATTENTION}' is for models whose layers attend to all that came "
            "before, or to a window of it, through transformers' attention interface, but "
            f"'{name}' is not one. Leave it out."
        )
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    return options | {"trust_remote_code": trust_remote_code}


def model_config(name: str, trust_remote_code: bool = False) -> Any:
    """Load a model's configuration without its weights, to check limits before anything heavy starts."""
    from transformers import AutoConfig

    with naming_choices("model", name):
        return AutoConfig.from_pretrained(resolve(name), trust_remote_code=trust_remote_code)


def context_length(name: str, trust_remote_code: bool = False) -> int:
    """Return the longest sequence that a model takes, in tokens; some have no limit."""
    return read_context_length(model_config(name, trust_remote_code))


def count_ids(
    name: str, tokenizer: Any, find_largest: Callable[[], int], trust_remote_code: bool = False
) -> int:
    """Return how many token ids a tokenizer and a model's embedding both have.

    A special token without a row, such as that of images in a text model, is no fault until a row uses it.

    Args:
        name: The model.
        tokenizer: The tokenizer.
        find_largest: Returns the largest id that the model is given.
        trust_remote_code: Run code that comes with the model.

    Raises:
        InputError: If any other token has no row.
    """
    num_rows = int(model_config(name, trust_remote_code).get_text_config().vocab_size)
    ids, added = tokenizer.get_vocab(), tokenizer.added_tokens_decoder
    beyond = {token: number for token, number in ids.items() if number >= num_rows}
    largest = find_largest() if beyond else 0
    lost = [t for t, n in beyond.items() if n <= largest or n not in added or not added[n].special]
    if lost:
        raise InputError(
            f"Every token must have a row in the model's embedding, but {len(lost)} of the tokenizer's have "
            f"none in the {num_rows} of '{name}', such as {lost[0]!r}. Use the tokenizer that belongs to it, "
            "or call resize_token_embeddings, train the new rows, and save the model."
        )
    return min(num_rows, 1 + max(ids.values()))


def read_context_length(config: Any) -> int:
    """Return how many tokens a model reads, by its configuration; sys.maxsize without a limit."""
    limit: int = getattr(config.get_text_config(), "max_position_embeddings", sys.maxsize)
    return limit


def can_replace_attention(config: Any) -> bool:
    """Return whether our attention can replace the model's.

    Each layer must attend to all that came before, or to a window of it, and the model's class must leave
    mask and products to transformers' attention interface.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    limits = (name for name in LIMITS if name != "sliding_window")
    if layers - {"full_attention", "sliding_attention"} or any(getattr(config, n, None) for n in limits):
        return False
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not isinstance(model_class, type):
        return False
    return bool(model_class.is_backend_compatible()) and supports_sdpa(model_class)


def is_model_folder(folder: Path) -> bool:
    """Return whether a folder holds a model, whole or an adapter."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))


def require_model_name(name: str) -> None:
    """Check a model's name without the hub: a path must lead to a folder.

    Raises:
        InputError: If it is none of an embedded model, a folder and a possible hub id; or if a file of the
            folder, other than weights, was changed since we wrote it.
    """
    folder = Path(name).expanduser()
    if name in (DEFAULT_MODEL, *MINIATURES):
        return
    if folder.is_dir():
        require_intact(folder)
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or folder.parent.is_dir():
        raise InputError(f"There is no model '{name}'. Use {MODEL_CHOICES}.")


def require_intact(folder: Path, weights: bool = False) -> None:
    """Check files of a model folder against its digests, if it has any.

    Args:
        folder: The folder.
        weights: Check its weights, which takes 0.2 s for a GiB; False: check all other files.

    Raises:
        InputError: Naming the first file that was changed.
    """
    names = [name for name in read_digests(folder) if name.endswith(".safetensors") == weights]
    if names:
        own_change = f"If you changed the file yourself, delete its line in {folder}/*{SUFFIX}."
        require_digests(folder, f"Export the model again. {own_change}", names)


@contextlib.contextmanager
def naming_choices(kind: str, name: str) -> Iterator[None]:
    """Turn a failure to find a model into one line that names the choices."""
    from safetensors import SafetensorError

    require_model_name(name)
    folder = Path(name).expanduser()
    if kind == "model" and (folder / "adapter_config.json").is_file():
        raise InputError(
            f"The model folder '{name}' must hold a whole model, but holds an adapter. Merge it with rlt "
            "export or peft's merge_and_unload."
        )
    try:
        yield
    except (ImportError, OSError, ValueError, SafetensorError) as error:
        if isinstance(error, InputError):
            raise
        fault = "has damaged weights" if isinstance(error, SafetensorError) else "could not be loaded"
        raise InputError(
            f"The {kind} '{name}' {fault} ({first_line(error, 200)}). Use {MODEL_CHOICES}."
        ) from error


def is_local(name: str) -> bool:
    """Return whether a model is in the package or in a folder, so that the hub is not asked for it."""
    return name in (DEFAULT_MODEL, *MINIATURES) or Path(name).expanduser().is_dir()


def announce_model(name: str, dtype: str, role: str = "") -> None:
    """Say which model is loaded next and, if there is a choice, what it is for."""
    as_dtype = "" if dtype == "auto" else f" as {dtype}"
    announce(f"loading {name}{as_dtype}{role and f': {role}'}")
