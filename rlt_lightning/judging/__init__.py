"""Decide whether an answer is right, in processes that can be killed."""
