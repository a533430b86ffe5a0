"""The base of all modules: a language model, called through the strategy's wrapper.

LanguageModelModule    EvaluationModule
└ PolicyModule         SFTModule: the model is trained (policy.py)
  └ OnPolicyModule     RLTModule, OPDModule: completions, frozen models and importance weights (on_policy.py)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule

from rlt_lightning.models.file_names import PretrainedFiles
from rlt_lightning.models.load import Dtype, announce_model, empty_model, load_model
from rlt_lightning.models.lora import LoRA, add_adapter
from rlt_lightning.models.weights import WeightFiles
from rlt_lightning.modules.phases import PhaseTimer
from rlt_lightning.run.interrupt import Interrupt
from rlt_lightning.run.ranks import meet
from rlt_lightning.strategies.sharding import ModelEntry, Unsharded, WeightLayout
from rlt_lightning.types import InputError


class LanguageModelModule(LightningModule):
    """A language model, loaded as the strategy stores it.

    Args:
        pretrained: The model: local folder, hub id, or a name such as miniature.
        dtype: Type of its weights.
        attn_implementation: transformers' name; None: ours, which shares prefixes.
        trust_remote_code: Run code that comes with a model.

    Attributes:
        data_classes: The datamodules that the module takes; `rlt` proposes the first.
        is_evaluation: Whether it asks a sampler for answers, and judges them.
    """

    data_classes: ClassVar[tuple[type[Any], ...]] = ()
    is_evaluation: ClassVar[bool] = False

    def __init__(
        self, pretrained: str, dtype: Dtype, attn_implementation: str | None, trust_remote_code: bool
    ) -> None:
        super().__init__()
        self.pretrained = pretrained
        self.dtype_name: Dtype = dtype
        self.attn_implementation = attn_implementation
        self.trust_remote_code = trust_remote_code
        self.phase = PhaseTimer()
        # configure_model sets both: the way into the model, and how its weights are stored.
        self.entry: ModelEntry | None = None
        self.sharding: WeightLayout = Unsharded(None)
        # Token ids that may be sampled; `setup` counts them.
        self.num_ids: int | None = None

    @property
    def policy(self) -> Any:
        """Return the model, to be called through `run`; None before `configure_model`, or without one."""
        return self.entry and self.entry.model

    def configure_callbacks(self) -> list[Callback]:
        """Refuse launches that do not work; let a signal to one rank stop all."""
        meet(self.trainer)
        return [Interrupt(self.trainer)]

    def require_data(self, data: Any) -> None:
        """Check that data are of this module's stage; they ask before they read anything.

        Raises:
            InputError: If they are not; it names the classes that are.
        """
        if not isinstance(data, self.data_classes):
            named = " or ".join(kind.__name__ for kind in self.data_classes)
            raise InputError(
                f"The data of {type(self).__name__} must be {named}, but are {type(data).__name__}. Choose "
                "another class for data, or another module."
            )

    def load(
        self, name: str, dtype: Dtype, role: str = "", lora: LoRA | None = None, seed: int = 0
    ) -> ModelEntry:
        """Load a model with this module's options, with or without adapter, sharded like the strategy.

        `role` says in the announcement what the model is for, and `seed` draws the adapter.
        """
        options = name, dtype, self.attn_implementation, self.trust_remote_code
        if self.sharding.sharded:
            model, read = empty_model(*options)
            if lora is not None:
                read = add_adapter(model, lora, seed, read)
            announce_model(name, dtype, role)
            entry = self.sharding.fill(model, read)
            entry.read = read
            return entry
        # What becomes 4 bits never lies on a GPU whole: its codes are computed on the CPU anyway.
        in_4_bits = lora is not None and lora.base == "4bit"
        with torch.device("cpu") if in_4_bits else nullcontext():
            model = load_model(*options, role)
            if lora is not None:
                # The export merges into weights that it reads from the files.
                PretrainedFiles(model, WeightFiles(name))
                add_adapter(model, lora, seed)
        return ModelEntry(model)

    def forward(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(policy, *arguments)`; the strategy wraps this forward."""
        assert self.entry is not None
        return self.entry(function, *arguments)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return `function(policy, *arguments)`, called through the strategy's wrapper."""
        return self.trainer.strategy.model(function, *arguments)  # type: ignore[misc]

    def on_any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return self.trainer.strategy.reduce_boolean_decision(flag, all=False)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Keep batches as they are: their lists of token ids become tensors when they are packed."""
        return batch
