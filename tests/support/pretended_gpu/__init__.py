"""A pretended GPU for tests: see README.md."""
