"""What the checks of kernels share: how a fault is found, and how it is told."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlt_lightning.numerics.head import full_precision
from rlt_lightning.types import InputError


class Refused(Exception):
    """A kernel is missing, or computes something else."""


def failure_of(function: Callable[[], str | None]) -> str | None:
    """Return the fault that a check finds, or the error that it raises.

    Libraries of kernels and compilers have error classes of their own, so every class counts.
    """
    try:
        return function()
    except (Refused, InputError) as reason:
        return str(reason)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"it fails with {type(error).__name__}: {lines[0][:150]}"


def relative_distance(
    fused: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: tuple[Tensor, ...]
) -> float | None:
    """Return the distance of a fused function's value or gradient from the plain one's, if it is too large.

    It is the norm of the difference as a fraction of the norm of the plain result in full precision.
    """
    dtype = inputs[0].dtype
    bound = 1e-3 if dtype == full_precision(dtype) else 0.02
    results = []
    for function, arguments in ((fused, inputs), (plain, [x.to(full_precision(dtype)) for x in inputs])):
        arguments = [x.detach().requires_grad_() for x in arguments]
        device = arguments[0].device.type
        with torch.enable_grad(), torch.autocast(device, enabled=False):
            value = function(*arguments)
            weights = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
            results.append([value, *torch.autograd.grad(value, arguments, weights)])
    distances = [
        ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
        for ours, theirs in zip(*results, strict=True)
    ]
    largest = max(distances, key=lambda distance: distance if distance == distance else torch.inf)
    return None if largest <= bound else largest  # NaN is too far too
