"""Compute all logits of a language-model head at once, and what follows from them; notice large tensors."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlt_lightning.numerics.head import LogitScale
from rlt_lightning.numerics.log_probs import scaled_log_softmax


def slow_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: LogitScale) -> Tensor:
    """All logits before the temperature, as the model's own code computes them."""
    logits = nn.functional.linear(hidden, weight, bias) * scale.scale
    if scale.exchanged is not None:
        columns = torch.arange(len(weight))
        columns[list(scale.exchanged)] = columns[list(scale.exchanged[::-1])]
        logits = logits[:, columns]
    return logits if scale.cap is None else scale.cap * torch.tanh(logits / scale.cap)


def token_log_probs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probs of the targets, (M,), from logits (M, V), in fp32 at least."""
    return scaled_log_softmax(logits, temperature).gather(1, targets.unsqueeze(1)).squeeze(1)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropies, (M,), of logits (M, V)."""
    return torch.special.entr(scaled_log_softmax(logits, temperature).exp()).sum(dim=-1)


class LargestTensor(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that is made meanwhile."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple) else (result,)
        self.numel = max([self.numel, *(t.numel() for t in outputs if isinstance(t, Tensor))])
        return result
