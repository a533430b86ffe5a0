"""Get a step's completions from an engine, and divide them over ranks."""
