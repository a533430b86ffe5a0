"""Weights into vLLM workers through folders that both sides see: all weights, or only an adapter."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from rlt_lightning.engines.base import EngineError, NamedTensor
from rlt_lightning.engines.client import WorkerClient
from rlt_lightning.engines.weights import Failures, WeightPush, on_each
from rlt_lightning.models.lora import ADAPTER, ADAPTER_FILE, save_adapter_config
from rlt_lightning.models.weights import gather_in_groups
from rlt_lightning.run.run_folder import VERSION_FOLDER
from rlt_lightning.types import InputError

# The ranks that --max-lora-rank takes.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class DiskPush(WeightPush):
    """Write a folder of safetensors files, complete or absent, and let the workers load it.

    Args:
        bucket_mib: As in `WeightPush`; each bucket is a file.
        timeout_s: As in `WeightPush`.
        folder: Where the folders are written; every worker must see it under this path. None: in the run
            folder.
    """

    backend = "disk"

    def __init__(self, bucket_mib: int = 256, timeout_s: float = 300.0, folder: str | None = None) -> None:
        super().__init__(bucket_mib, timeout_s)
        self.own_folder = Path(folder) if folder else None
        self.folder = self.own_folder or Path("weights")

    def open(self, model: Any, folder: Path) -> None:
        """Write into the run folder, unless another was given."""
        self.folder = self.own_folder or folder

    def transfer(
        self, named_tensors: list[NamedTensor], workers: list[WorkerClient], version: str, failures: Failures
    ) -> None:
        """Write, rename, load; then delete the folder of the push before."""
        from safetensors.torch import save_file

        parent = self.folder.resolve()
        target, scratch = parent / version, parent / f"{version}.tmp"
        for stale in (target, scratch):
            shutil.rmtree(stale, ignore_errors=True)
        problem: OSError | None = None
        try:
            scratch.mkdir(parents=True)
            self.describe(scratch)
        except OSError as error:
            problem = error
        names = iter(name for name, _ in named_tensors)
        for number, tensors in enumerate(gather_in_groups(named_tensors, self.gather_bytes)):
            bucket = {next(names): tensor.detach().cpu().contiguous() for tensor in tensors}
            try:
                if problem is None:
                    save_file(bucket, scratch / self.file_name(number))
            except OSError as error:
                problem = error  # keep gathering: the other ranks do
            bucket.clear()
        if problem is not None:
            raise EngineError(
                f"The weights must be written to {scratch}, but that failed ({problem}). Make room."
            )
        scratch.rename(target)
        on_each(workers, lambda worker: self.load(worker, target, version), failures)
        own = version.rpartition("-")[0] if self.own_folder else ""  # a given folder may serve several runs
        for other in parent.iterdir():
            if other != target and VERSION_FOLDER.fullmatch(other.name) and other.name.startswith(own):
                shutil.rmtree(other, ignore_errors=True)

    def describe(self, folder: Path) -> None:
        """Write the files that belong beside the weights: none."""

    def file_name(self, number: int) -> str:
        """Return the name of a bucket's file."""
        return f"model-{number:05d}.safetensors"

    def load(self, worker: WorkerClient, folder: Path, version: str) -> None:
        """Let a worker load a folder."""
        self.start(worker)
        self.post(worker, "/update_weights", {"update_info": {"folder": str(folder)}})
        self.finish(worker, version)


class AdapterPush(DiskPush):
    """Write only a LoRA's matrices, as peft does, and let the workers load them beside the base's weights.

    There is far less to write and to load than merged weights, but sampling is slower, since each adapted
    layer multiplies twice more. Requests name the push that they want, so an older adapter never serves them.

    Args:
        timeout_s: As in `WeightPush`.
        folder: As in `DiskPush`.
    """

    backend = "adapter"
    takes_adapters = True

    def __init__(self, timeout_s: float = 300.0, folder: str | None = None) -> None:
        super().__init__(timeout_s=timeout_s, folder=folder)
        self.model: Any = None

    @property
    def gather_bytes(self) -> int:
        """Return no limit: the matrices are few, and peft wants one file."""
        return sys.maxsize

    def open(self, model: Any, folder: Path) -> None:
        """Require a model with an adapter."""
        super().open(model, folder)
        if not hasattr(model, "peft_config"):
            raise InputError(
                "AdapterPush needs a teacher with an adapter, but model.lora is not set. Set it, or push "
                "whole weights with GlooPush."
            )
        self.model = model

    def launch_options(self) -> tuple[list[str], dict[str, str]]:
        """Let workers take one adapter at a time, of our rank or the next that vLLM has."""
        rank = min((r for r in VLLM_RANKS if r >= self.model.peft_config[ADAPTER].r), default=VLLM_RANKS[-1])
        arguments = ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
        return arguments, {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

    def describe(self, folder: Path) -> None:
        """Write the adapter's configuration."""
        save_adapter_config(self.model, str(self.model.name_or_path), folder)

    def file_name(self, number: int) -> str:
        """Return peft's name for the file of an adapter."""
        return ADAPTER_FILE

    def load(self, worker: WorkerClient, folder: Path, version: str) -> None:
        """Load the new adapter, announce its version, and drop the one before."""
        self.start(worker)
        self.finish(worker, version)  # before the adapter: vLLM forgets adapters when weights change
        adapter = {"lora_name": version, "lora_path": str(folder)}
        self.post(worker, "/v1/load_lora_adapter", adapter, in_words=True)
        former, worker.adapter = worker.adapter, version
        if former is not None:
            self.post(worker, "/v1/unload_lora_adapter", {"lora_name": former}, in_words=True)
