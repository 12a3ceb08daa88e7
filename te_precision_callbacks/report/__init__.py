"""A recorded run as one page that opens offline, as pictures, and as numbers.

from te_precision_callbacks.report import write_report
from te_precision_callbacks.store import open_run

write_report(open_run("logs"), "report.html")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.report.page import write_report
    from te_precision_callbacks.report.subjects import ReportError

__all__ = ["ReportError", "write_report"]

__getattr__, __dir__ = lazy_names(__name__)
