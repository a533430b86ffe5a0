"""Where metrics go: metrics.csv, Weights & Biases, and a W&B workspace that shows them."""

from rlt_lightning.loggers.wandb_logger import WandbLogger

__all__ = ["WandbLogger"]
