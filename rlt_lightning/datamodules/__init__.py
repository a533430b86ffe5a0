"""Rows from any source, tokenised into the contexts of teacher and student."""

from rlt_lightning.datamodules.formats import ChatFormat, TagStyle
from rlt_lightning.datamodules.stratos import StratosDataModule

__all__ = ["ChatFormat", "StratosDataModule", "TagStyle"]
