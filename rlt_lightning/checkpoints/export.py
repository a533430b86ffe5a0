"""Export a trained model as an ordinary Hugging Face folder: at the end of a run, or from any checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from rlt_lightning.checkpoints.card import CARD, write_model_card
from rlt_lightning.checkpoints.folder import (
    ONE_PROCESS,
    WEIGHTS,
    find_checkpoint,
    read_state,
    read_whole_state,
    replace_folder,
)
from rlt_lightning.models.embedded import resolve
from rlt_lightning.models.file_names import to_file_names
from rlt_lightning.models.format import (
    ModelFormat,
    with_default_system,
    write_format,
)
from rlt_lightning.models.load import empty_model, is_model_folder, load_tokenizer
from rlt_lightning.models.lora import (
    ADAPTER_FILE,
    LoRA,
    add_adapter,
    list_adapter_weights,
    merge_weights,
    save_adapter_config,
)
from rlt_lightning.models.template import find_eos_token_ids, find_turn_opening, render_chat
from rlt_lightning.models.weights import (
    SAFETENSORS,
    Deferred,
    Read,
    WeightFiles,
    stored_once,
    trained_tensors,
    write_weights,
)
from rlt_lightning.run.digests import write_digests
from rlt_lightning.types import InputError, as_list, naming_full_disk

Adapter = Literal["merged", "separate"]


def export_model(
    model: Any,
    tensors: dict[str, Any],
    tokenizer: Any,
    metadata: dict[str, Any],
    folder: Path,
    adapter: Adapter = "merged",
    strategy: Any = ONE_PROCESS,
) -> None:
    """Write weights, configuration, tokenizer with chat template and model card, with all ranks.

    The model card has no digest, since it is there to be edited.

    Args:
        model: The model that gives the configuration; its weights may be empty.
        tensors: Its stored weights by name, or placeholders for them.
        tokenizer: The tokenizer.
        metadata: What `PolicyModule.build_metadata` returned.
        folder: An existing folder to write to.
        adapter: How a LoRA is written: merged into the weights, or as a separate folder for peft and vLLM.
        strategy: The strategy whose ranks write.
    """
    if strategy.global_rank == 0:
        tokenizer = copy.deepcopy(tokenizer)
        write_trained_format(metadata, tokenizer, folder)
        tokenizer.save_pretrained(folder)
        (folder / CARD).write_text(write_model_card(metadata, adapter == "separate"), encoding="utf-8")
        if adapter == "merged":
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(folder)
            generation = copy.deepcopy(model.generation_config)
            configured = as_list(generation.eos_token_id)
            missing = find_eos_token_ids(model, tokenizer).difference(configured)
            if missing:
                generation.eos_token_id = [*configured, *sorted(missing)]
            sampling = [
                name
                for name in ("temperature", "top_p", "top_k")
                if getattr(generation, name, None) is not None
            ]
            # Some models come with sampling settings; transformers refuses to write them for greedy decoding.
            if generation.do_sample is False:
                for name in sampling:
                    setattr(generation, name, None)
            elif sampling:
                generation.do_sample = True
            generation.save_pretrained(folder)
        else:
            save_adapter_config(model, resolve(metadata["pretrained"]), folder)
    if adapter == "merged":
        named_tensors, file_name = to_file_names(model, merge_weights(model, tensors)), SAFETENSORS
    else:
        named_tensors, file_name = list_adapter_weights(tensors), ADAPTER_FILE
    written = write_weights(named_tensors, folder, strategy.global_rank, strategy.world_size, file_name)
    if strategy.global_rank == 0:
        settings = [path for path in folder.rglob("*") if path.suffix in (".json", ".jinja")]
        written = sorted({*written, *settings})
    if written:
        write_digests(folder, written, strategy.global_rank)


def write_trained_format(metadata: dict[str, Any], tokenizer: Any, folder: Path) -> None:
    """Write the format of the training into a model folder and into the tokenizer's chat template.

    A template that opens a thought by itself cannot give the prompts of the training: a warning says so.
    """
    trained = ModelFormat.from_plain(metadata["format"], "the checkpoint")
    write_format(trained, folder)
    question = [{"role": "user", "content": "?"}]
    system = [{"role": "system", "content": trained.system_prompt}] if trained.system_prompt else []
    in_training = render_chat(tokenizer, system + question).removesuffix(find_turn_opening(tokenizer)[0])
    tokenizer.chat_template = with_default_system(tokenizer.chat_template, trained.system_prompt)
    if tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True) != in_training:
        rank_zero_warn(
            "The chat template opens a thought after the question, which the training did without. Send "
            "servers of this model the whole prompt of the training, to /v1/completions."
        )


def export_checkpoint(
    ckpt_path: str,
    output_dir: str,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    adapter: Adapter = "merged",
    overwrite: bool = False,
) -> None:
    """Make a Hugging Face folder from a checkpoint of any strategy, with at most 4 GiB of weights in memory.

    Args:
        ckpt_path: A checkpoint, or a run's folder for its newest checkpoint.
        output_dir: The folder to make.
        dtype: Type of the weights; none: the run's model.dtype.
        adapter: How a LoRA is written: merged into the weights, or as a separate folder for peft and vLLM.
        overwrite: Replace a model in output_dir.
    """
    path, folder = find_checkpoint(Path(ckpt_path)), Path(output_dir).resolve()
    for suffix in (".old", ".tmp"):  # which a killed export leaves, or a user has made
        if (aside := folder.with_name(folder.name + suffix)).exists():
            raise InputError(f"{aside} would be replaced by this export. Move it, or choose another folder.")
    made = folder.is_file() or (folder.exists() and any(folder.iterdir()))
    if made and not (overwrite and is_model_folder(folder)):
        raise InputError(
            f"--output_dir must be empty or new, but {folder} is not. Choose another, or replace a model "
            "that is there with --overwrite true."
        )
    if adapter == "separate" and read_state(path)["model"]["lora"] is None:
        raise InputError(
            f"--adapter separate needs a run with model.lora, but {path} is from a run without it. Drop it."
        )
    write_model_folder(path, folder, dtype, adapter)
    print(f"Done: {folder}, from {path}")


def write_model_folder(
    path: Path, folder: Path, dtype: str | None = None, adapter: Adapter = "merged"
) -> None:
    """Write the model folder of a checkpoint, only in this process; arguments as `export_checkpoint`."""
    metadata = read_whole_state(path)["model"]
    metadata["dtype"] = dtype or metadata["dtype"]
    if metadata["lora"] is None:
        adapter = "merged"
    model, tensors = load_pretrained_tensors(metadata)
    files = WeightFiles(str(path / WEIGHTS))
    tensors |= {name: defer_reading(files, name, tensor) for name, tensor in trained_tensors(model).items()}
    tokenizer = load_tokenizer(
        metadata["tokenizer"], metadata["trust_remote_code"], metadata["chat_template"]
    )
    with naming_full_disk(folder), replace_folder(folder, ONE_PROCESS) as scratch:
        export_model(model, tensors, tokenizer, metadata, scratch, adapter)


def load_pretrained_tensors(metadata: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the model before its training, empty, with placeholders for its weights, read from files."""
    model, read = empty_model(metadata["pretrained"], metadata["dtype"], None, metadata["trust_remote_code"])
    if metadata["lora"] is not None:
        read = add_adapter(model, LoRA(**metadata["lora"]), 0, read)
    return model, {name: defer_reading(read, name, tensor) for name, tensor in stored_once(model).items()}


def defer_reading(read: Read, name: str, like: Tensor) -> Deferred:
    """Return a placeholder for a tensor in a file, which is read when it is written."""
    return Deferred(like.shape, like.dtype, lambda: read(name).to(like.dtype))
