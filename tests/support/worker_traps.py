"""Loaded inside a vLLM worker under test: it can switch off the repairs of our extension."""

from __future__ import annotations

from rlt_lightning import vllm_worker


class TrapExtension(vllm_worker.WorkerExtension):
    """Our extension, with a switch."""

    def leave_tied_heads_stale(self, stale: bool) -> None:
        """Bring back, or take away, vLLM's own behaviour after a reload."""
        vllm_worker.repack_tied_heads = ignore if stale else REPAIR


REPAIR = vllm_worker.repack_tied_heads


def ignore(model: object) -> None:
    """Repair nothing."""
