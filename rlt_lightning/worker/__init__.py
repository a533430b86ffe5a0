"""What vLLM's worker processes import: memory and a process group that they share with the trainer.

It needs only torch. Here are the versions of vLLM that it works with.
"""

# Tests run a real worker of the first, which the extra vllm installs. For the second, which only a worker
# that was started by hand can be, we compared the parts that we use in its sources.
VLLM_MINORS = ("0.32", "0.33")


def get_minor(version: str) -> str:
    """Return the minor of a version: 0.32 of 0.32.1+cpu."""
    return ".".join(version.split(".")[:2])
