"""The version of the package, which files that write anything name in it, and of vLLM as a worker."""

__version__ = "0.1.0"

# Tests run the first with a real worker. What we use of the second was compared in its sources.
VLLM_MINORS = ("0.32", "0.33")


def get_minor(version: str) -> str:
    """Return the minor of a version: 0.32 of 0.32.1+cpu."""
    return ".".join(version.split(".")[:2])
