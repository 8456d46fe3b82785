"""One self-contained page per run, and one that puts runs side by side."""

from viviane.report.comparison import RunFacts, compare_runs, write_comparison
from viviane.report.importance import FeatureImportance, Importance, permutation_importance
from viviane.report.page import REPORT_FILE, write_report

__all__ = [
    "REPORT_FILE",
    "FeatureImportance",
    "Importance",
    "RunFacts",
    "compare_runs",
    "permutation_importance",
    "write_comparison",
    "write_report",
]
