"""Checkpoint folders: written whole or not at all, found, read, and turned into model folders."""
