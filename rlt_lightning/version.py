"""The version of the package, which files that write anything name in it."""

__version__ = "0.1.0"
