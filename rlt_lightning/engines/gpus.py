"""Choose the GPUs of a launched worker from the GPUs that this process sees.

CUDA_VISIBLE_DEVICES, where it is set, names the GPUs of the machine that a process may use, by number or
UUID. PyTorch and Lightning count among these from 0. So does `launch.gpus`:

    CUDA_VISIBLE_DEVICES=4,5,6,7   trainer.devices: 2      trains on 4 and 5
                                   launch.gpus: [[2], [3]] workers sample on 6 and 7
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlt_lightning.types import InputError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """Return the names of the GPUs that the environment shows; None if it shows all.

    CUDA reads the list up to its first entry that is no GPU, such as -1.

    Raises:
        InputError: If an entry occurs twice: CUDA would then show none at all.
    """
    if VARIABLE not in environment:
        return None
    found: list[str] = []
    for word in environment[VARIABLE].split(","):
        name = word.strip()
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", name):
            break
        if name in found:
            raise InputError(
                f"{VARIABLE} must name each GPU once, but names {name} twice: "
                f"'{environment[VARIABLE]}'. Correct it."
            )
        found.append(name)
    return found


def worker_gpus(gpus: list[int], environment: Mapping[str, str], number: int | None = None) -> str:
    """Return a worker's CUDA_VISIBLE_DEVICES.

    Args:
        gpus: Positions among the GPUs that this process sees.
        environment: The environment variables of this process.
        number: The machine's number of GPUs, read if the environment shows all; None: unknown.

    Raises:
        InputError: If a position is beyond the GPUs that this process sees.
    """
    visible = visible_gpus(environment)
    if visible is None:
        visible = [str(i) for i in range(max(gpus) + 1 if number is None else number)]
        shown = "the machine has"
    else:
        shown = f"{VARIABLE}='{environment[VARIABLE]}' shows"
    if beyond := [i for i in gpus if not 0 <= i < len(visible)]:
        raise InputError(
            f"launch.gpus must count, from 0, among the GPUs that this process sees, but names {beyond[0]}, "
            f"and {shown} {len(visible)}. Correct it, or show the process more GPUs."
        )
    return ",".join(visible[i] for i in gpus)


def shared_out(share: str) -> tuple[int, int]:
    """Return how many GPUs sample and how many train, from a share such as 3+5.

    Raises:
        InputError: If the share has another form.
    """
    numbers = re.fullmatch(r"\s*(\d+)\s*\+\s*(\d+)\s*", share)
    if numbers is None or int(numbers.group(1)) < 1:
        raise InputError(
            "launch.share must be two numbers, the GPUs that sample and the GPUs that train, such as 3+5, "
            f"but is '{share}'. Correct it."
        )
    return int(numbers.group(1)), int(numbers.group(2))


def trainer_devices(share: str, devices: object) -> object:
    """Return trainer.devices for a share: its number of GPUs that train.

    Args:
        share: GPUs that sample + GPUs that train.
        devices: trainer.devices as it is set; auto and -1 leave the number to the share.

    Raises:
        InputError: If both are set and do not agree.
    """
    _, trains = shared_out(share)
    if trains == 0:
        return devices
    if str(devices) in ("auto", "-1"):
        return trains
    ids = devices if isinstance(devices, list) else re.findall(r"\d+", str(devices))
    listed = isinstance(devices, list) or "," in str(devices)
    agree = [int(i) for i in ids] == list(range(trains)) if listed else str(devices) == str(trains)
    if not agree:
        raise InputError(
            f"launch.share {share} lets the first {trains} GPU(s) train, so trainer.devices must be {trains} "
            f"or left out, but is {devices}. Correct one of them."
        )
    return devices
