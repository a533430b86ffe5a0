"""`rlt plan`: predict a run's memory and time, and what would not fit, before anything is loaded."""

from rlt_lightning.plan.inputs import PlanOptions
from rlt_lightning.plan.page import plan_page, write_json
from rlt_lightning.plan.settings import read_setup
from rlt_lightning.plan.verdict import make_plan

__all__ = ["PlanOptions", "make_plan", "plan_page", "read_setup", "write_json"]
