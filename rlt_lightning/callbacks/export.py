"""Write the trained model as an ordinary Hugging Face folder, and upload it to the hub if asked."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from rlt_lightning.checkpoints.card import CARD
from rlt_lightning.checkpoints.export import (
    Adapter,
    export_model,
    load_pretrained_tensors,
    write_model_folder,
)
from rlt_lightning.checkpoints.folder import replace_folder
from rlt_lightning.checkpoints.io import NamedCheckpoints
from rlt_lightning.console import announce, announce_writing
from rlt_lightning.datamodules.stratos import get_stratos_data
from rlt_lightning.models.weights import trained_tensors, weights_size
from rlt_lightning.run.redaction import redact
from rlt_lightning.types import InputError

# Files of an earlier model in the repository, which transformers or peft would load in place of the new ones.
REPLACED = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json"]
# No network, no right, a name or a card that the hub refuses. Uploads wrap some of them in a RuntimeError.
HUB_ERRORS = (HTTPError, OSError, RuntimeError, ValueError)


class ModelExporter(Callback):
    """At the end of training write `model/`: safetensors, tokenizer, generation config and a model card.

    Args:
        enabled: Whether to write it; `rlt export` makes the folder from any checkpoint later.
        adapter: How to write a LoRA: merged into the weights, or only the adapter, as peft and vLLM read it.
        repo_id: Repository of the Hugging Face hub, USER/NAME, to upload the model to. It is made before
            training begins, so that a missing right shows at once. The token is that of `hf auth login` or
            HF_TOKEN.
        private: Whether only you may see that repository, if it is made. One that exists stays as it is.
    """

    def __init__(
        self,
        enabled: bool = True,
        adapter: Adapter = "merged",
        repo_id: str | None = None,
        private: bool = True,
    ) -> None:
        if repo_id is not None and not enabled:
            raise InputError("export.repo_id uploads model/, but export.enabled is false. Drop one of them.")
        self.enabled = enabled
        self.adapter: Adapter = adapter
        self.repo_id = repo_id
        self.private = private
        # Whether this fit has written a model, and whether the hub did not take it.
        self.has_written = self.upload_failed = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Create the repository before any model is loaded, or say why this fails."""
        if stage != "fit" or self.repo_id is None or not trainer.is_global_zero:
            return
        try:
            HfApi().create_repo(self.repo_id, private=self.private, exist_ok=True)
        except HUB_ERRORS as error:
            raise InputError(
                f"export.repo_id must be a repository to which you may write, but {self.repo_id} is not "
                f"({describe_error(error)}). Log in with `hf auth login`, set HF_TOKEN, or leave it out."
            ) from error

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.enabled or is_dry_run(trainer):
            return
        module: Any = pl_module
        with replace_folder(Path(trainer.default_root_dir) / "model", trainer.strategy) as folder:
            tokenizer = get_stratos_data(trainer).format.tokenizer
            metadata, policy = module.build_metadata(), module.policy
            # DeepSpeed computes with rounded copies of the weights that it trains, and of the frozen weights.
            strategy: Any = trainer.strategy
            named = isinstance(strategy, NamedCheckpoints)
            tensors: dict[str, Any] = strategy.weights(policy) if named else trained_tensors(policy)
            if module.lora is not None:
                tensors = load_pretrained_tensors(metadata)[1] | tensors
            announce_writing(folder, weights_size(tensors.values()))
            adapter: Adapter = "merged" if module.lora is None else self.adapter
            export_model(policy, tensors, tokenizer, metadata, folder, adapter, strategy)
        self.has_written = True

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the model of a run that was killed after its last checkpoint: no step is left."""
        # Without a checkpoint nothing was trained at all.
        if not self.enabled or self.has_written or is_dry_run(trainer):
            return
        if trainer.ckpt_path is None or not trainer.is_global_zero:
            return
        write_model_folder(
            Path(trainer.ckpt_path), Path(trainer.default_root_dir) / "model", adapter=self.adapter
        )
        self.has_written = True

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Hide secrets in the card and upload the model, where no other rank waits for this one.

        A failed upload does not fail the run.
        """
        if stage != "fit" or not self.has_written or not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir) / "model"
        card = folder / CARD
        card.write_text(redact(card.read_text(encoding="utf-8")), encoding="utf-8")
        if self.repo_id is None:
            return
        try:
            commit = HfApi().upload_folder(
                repo_id=self.repo_id,
                folder_path=folder,
                delete_patterns=REPLACED,
                commit_message="Upload model",
            )
        except HUB_ERRORS as error:
            self.upload_failed = True
            rank_zero_warn(
                f"The model is in {folder}, but not on the hub ({describe_error(error)}). To upload it: "
                + shlex.join(["hf", "upload", self.repo_id, str(folder), "."])
            )
        else:
            announce(f"{folder} is on the hub: {commit.repo_url}")


def describe_error(error: BaseException) -> str:
    """Return an error of the hub as one line without secrets."""
    return str(redact(" ".join(str(error).split())))


def is_dry_run(trainer: Any) -> bool:
    """Return whether a run only tries each step, by Lightning's fast_dev_run: its weights are no result."""
    return bool(trainer.fast_dev_run)
