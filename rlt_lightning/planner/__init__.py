"""`rlt plan`: predict a run's memory and time, and what would not fit, before anything is loaded."""

from rlt_lightning.planner.options import PlanOptions
from rlt_lightning.planner.page import plan_page, write_json
from rlt_lightning.planner.settings import read_setup
from rlt_lightning.planner.verdict import make_plan

__all__ = ["PlanOptions", "make_plan", "plan_page", "read_setup", "write_json"]
