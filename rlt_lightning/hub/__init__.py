"""Publish what a run has made on the Hugging Face hub: `rlt push`."""
