"""Scoring a few problems: one explanation, a teacher's own, or those of a check."""
