"""Reinforcement-Learned Teachers (RLT, arXiv:2506.08388) as a PyTorch Lightning trainer."""

__version__ = "0.1.0"
