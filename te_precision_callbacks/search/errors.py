"""Errors of a search."""

from te_precision_callbacks.base.errors import PrecisionDebugError


class SearchError(PrecisionDebugError, RuntimeError):
    """A search cannot run, or cannot continue. The state of the training was put back."""


class BudgetError(SearchError):
    """No choice meets the budget."""
