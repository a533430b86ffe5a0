"""The miniatures that the package does not bring, by their folders in research/."""

from commands import ROOT

FOLDER = ROOT / "research" / "miniatures"
SEED1, QWEN2, PIECES = (str(FOLDER / f"miniature-{name}") for name in ("seed1", "qwen2", "pieces"))
