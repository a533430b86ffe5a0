"""`rlt report`: run folders as one page that can be opened, sent and kept; nothing is loaded from a network."""

from rlt_lightning.report.page import report, write_page

__all__ = ["report", "write_page"]
