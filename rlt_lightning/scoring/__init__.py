"""Scoring a few problems: one explanation, a teacher's own, those of a check, or of TRL and verl."""
