"""Scoring a few problems: one explanation, a teacher's own, or those that TRL and verl sample."""
