"""One self-contained page per run that a person would rather look at than read logs."""

from viviane.report.page import REPORT_FILE, write_report

__all__ = ["REPORT_FILE", "write_report"]
