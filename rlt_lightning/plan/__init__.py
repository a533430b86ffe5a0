"""`rlt plan`: predict a run's memory and time, and what would not fit, before anything is loaded."""

from rlt_lightning.plan.inputs import PlanOptions
from rlt_lightning.plan.settings import read_setup
from rlt_lightning.plan.verdict import format_plan, make_plan, write_json

__all__ = ["PlanOptions", "format_plan", "make_plan", "read_setup", "write_json"]
