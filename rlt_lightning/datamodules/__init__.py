"""Rows from any source, tokenised into the contexts of teacher and student."""
