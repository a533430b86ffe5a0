"""scripts/setup_vllm_gpu.sh asks the driver first, and its dry run prints what it would do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from commands import ROOT


def dry_run(folder: Path, driver: str | None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a stand-in for nvidia-smi, and change nothing."""
    (folder / "bin").mkdir()
    for name in ("bash", "dirname", "python3"):
        (folder / "bin" / name).symlink_to(
            next(p for d in os.get_exec_path() if (p := Path(d) / name).exists())
        )
    if driver is not None:
        (folder / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\necho '{driver}'\necho '{driver}'\n")
        (folder / "bin" / "nvidia-smi").chmod(0o755)
    variables = {"PATH": str(folder / "bin"), "DRY_RUN": "1", "VENV": str(folder / "vllm")} | environment
    command = ["bash", str(ROOT / "scripts" / "setup_vllm_gpu.sh")]
    return subprocess.run(command, capture_output=True, text=True, env=variables, check=False)


def test_a_new_driver_gets_the_wheel_of_pypi(tmp_path: Path) -> None:
    result = dry_run(tmp_path, "580.95.05")
    assert result.returncode == 0, result.stderr
    venv = tmp_path / "vllm"
    assert result.stdout.splitlines()[:3] == [
        f"python3 -m venv --clear {venv}",
        f"{venv}/bin/python -m pip install --quiet --no-compile vllm==0.32.0",
        f"{venv}/bin/python -m pip install --quiet --no-deps .",
    ]
    assert not venv.exists()


def test_an_older_driver_gets_builds_that_are_named(tmp_path: Path) -> None:
    index = "https://download.pytorch.org/whl/cu129"
    result = dry_run(tmp_path, "550.54.15", INDEX=index, VLLM="vllm.whl")
    assert f"--extra-index-url {index} vllm.whl\n" in result.stdout


@pytest.mark.parametrize(
    ("driver", "index", "fault"),
    [
        (None, "", "nvidia-smi must be on PATH"),
        ("570.86.10", "", "the driver must be 580 or newer, but is 570.86.10"),
        ("570.86.10", "https://an.index", "set both VLLM and INDEX"),  # PyPI's vLLM would come all the same
        ("515.65.01", "https://an.index vllm.whl", "need driver 525 or newer, but it is 515.65.01"),
        ("NVIDIA-SMI has failed", "", "must report a driver version"),
    ],
)
def test_a_driver_that_will_not_do_is_refused(
    driver: str | None, index: str, fault: str, tmp_path: Path
) -> None:
    given = dict(zip(("INDEX", "VLLM"), index.split(), strict=False))
    result = dry_run(tmp_path, driver, **given)
    assert result.returncode == 2
    assert fault in result.stderr
    assert result.stdout == ""
