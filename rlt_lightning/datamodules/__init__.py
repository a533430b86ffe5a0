"""Datamodules: read rows from any source and tokenise them for teacher and student; read evaluation sets."""

from rlt_lightning.datamodules.evaluation import EvaluationDataModule
from rlt_lightning.datamodules.formats import ChatFormat
from rlt_lightning.datamodules.stages import (
    ScoringData,
    StudentLikelihoodData,
    StudentOPDData,
    StudentRLData,
    StudentSFTData,
    TeacherRLData,
    TeacherSFTData,
)
from rlt_lightning.datamodules.stratos import StratosDataModule
from rlt_lightning.tags import TagStyle

__all__ = [
    "ChatFormat",
    "EvaluationDataModule",
    "ScoringData",
    "StratosDataModule",
    "StudentLikelihoodData",
    "StudentOPDData",
    "StudentRLData",
    "StudentSFTData",
    "TagStyle",
    "TeacherRLData",
    "TeacherSFTData",
]
