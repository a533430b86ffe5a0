"""Every tensor that ranks reduce lies on the root device, and so do the module and its buffers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import ranks
import torch
from cases import slow
from device_rules import Places, Refusing, rules_of
from ruled_run import run_ruled


@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        ("zero3", "rlt"),
        slow("zero1", "sft"),
        slow("zero3", "sft"),
        slow("zero1", "rlt"),
        slow("zero2", "rlt"),
        slow("zero3_offload", "rlt"),
        slow("fsdp2", "rlt"),
        slow("fsdp2", "sft"),
        slow("ddp", "rlt"),
        slow("ddp", "sft"),
    ],
)
def test_no_tensor_in_main_memory_is_reduced(
    strategy: str, method: str, tiny_model: str, tmp_path: Path
) -> None:
    if strategy.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("needs the deepspeed extra")
    ranks.call("ruled_run:run_ruled", tmp_path, tiny_model, str(tmp_path), strategy, method)


def test_a_single_process_reduces_nothing_of_main_memory(tiny_model: str, tmp_path: Path) -> None:
    run_ruled(0, tiny_model, str(tmp_path), "single", "rlt")


def test_the_rules_tell_devices_apart() -> None:
    with rules_of(torch.device("cpu", 1)) as places:
        refuse = Refusing(lambda tensor: tensor, places)
        ours = torch.zeros(2, device="cpu:1")
        moved = torch.ones(2).to("cpu:1")
        for tensor in (ours, moved, ours + 1, ours.sum(), torch.tensor(1.0, device="cpu:1")):
            refuse(tensor)
        for tensor in (torch.zeros(2), torch.tensor(1.0), torch.zeros(2, device="cpu")):
            with pytest.raises(RuntimeError, match="No backend type"):
                refuse(tensor)
    assert refuse.number == 8
    assert isinstance(places, Places)
