"""A recorded run as one page that opens offline.

from te_precision_callbacks.views.report import write_report
from te_precision_callbacks.runs import open_run

write_report(open_run("logs"), "report.html")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.base.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.views.report.data import ReportError
    from te_precision_callbacks.views.report.page import write_report

__all__ = ["ReportError", "write_report"]

__getattr__, __dir__ = lazy_names(__name__)
