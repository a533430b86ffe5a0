"""Find the miniatures that are in research/ and not in the package."""

from commands import ROOT

FOLDER = ROOT / "research" / "miniatures"
SEED1, QWEN2, PIECES = (str(FOLDER / f"miniature-{name}") for name in ("seed1", "qwen2", "pieces"))
