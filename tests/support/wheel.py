"""The package as users have it: a wheel, in an environment that has its base dependencies and nothing else.

The environment needs no network. What this interpreter has installed is linked into it, distribution by
distribution: what the wheel requires, and what that requires. The checkout is not in it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from commands import ROOT
from packaging.requirements import Requirement

PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
OFFLINE = ["--no-deps", "--no-index"]
READS = "RLT_TEST_READS"
# Run by every Python of the environment: it writes down each file of the checkout that is opened or listed.
HOOK = f"""
import os, sys

def note(event, arguments):
    if event not in ("open", "os.listdir", "os.scandir") or not arguments:
        return
    path = arguments[0]
    if isinstance(path, (str, bytes, os.PathLike)):
        name = os.path.abspath(os.fsdecode(path))
        if name.startswith({str(ROOT)!r}) and not name.startswith({str(ROOT / ".venv")!r}):
            os.write(reads, (name + "\\n").encode())

if "{READS}" in os.environ:
    reads = os.open(os.environ["{READS}"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.addaudithook(note)
"""


def build_wheel(folder: Path, checkout: Path = ROOT) -> Path:
    """Build the wheel into a folder, by the hatchling that is installed here."""
    build = [*PIP, "wheel", str(checkout), *OFFLINE, "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run(build, check=True, timeout=570)
    [wheel] = folder.glob("*.whl")
    return wheel


def required(requirements: list[Requirement], found: dict[str, Distribution]) -> dict[str, Distribution]:
    """Return the distributions of these requirements and of theirs, by name."""
    for requirement in requirements:
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in found and not requirement.extras:
            continue
        found[name] = distribution(name)
        theirs = map(Requirement, found[name].requires or [])
        required([other for other in theirs if is_wanted(other, requirement.extras)], found)
    return found


def is_wanted(requirement: Requirement, extras: set[str]) -> bool:
    """Whether a requirement applies here, to a distribution with these extras."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in extras or {""})


def files_of(distributions: list[Distribution]) -> Iterator[tuple[Path, Path]]:
    """Yield what to link: its place in site-packages and where it is; a whole folder where one owns it."""
    tops: defaultdict[str, list[tuple[Path, Path]]] = defaultdict(list)
    owners: Counter[str] = Counter()
    for one in distributions:
        files = [
            path for path in one.files or [] if path.parts[0] != ".." and "__pycache__" not in path.parts
        ]
        owners.update({path.parts[0] for path in files})
        for path in files:
            tops[path.parts[0]].append((Path(path), Path(str(one.locate_file(path)))))
    for top, files in tops.items():
        path, target = files[0]
        if owners[top] == 1:
            yield Path(top), target.parents[len(path.parts) - 2] if len(path.parts) > 1 else target
        else:
            yield from files


def fresh_environment(wheel: Path, folder: Path) -> Path:
    """Make an environment with the wheel and its base dependencies, and return its folder of programs."""
    venv.create(folder, with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    python = folder / "bin" / "python"
    subprocess.run([*PIP, "--python", str(python), "install", str(wheel), *OFFLINE], check=True, timeout=570)
    [ours] = site.glob("rlt_lightning-*.dist-info")
    base = [one for one in map(Requirement, Distribution.at(ours).requires or []) if is_wanted(one, set())]
    for place, target in files_of([*required(base, {}).values()]):
        (site / place).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(target, site / place)
    (site / "sitecustomize.py").write_text(HOOK)
    return folder / "bin"
