"""`rlt report`: run folders as one page, to be opened anywhere, sent and kept."""

from rlt_lightning.report.page import report, write_page

__all__ = ["report", "write_page"]
