"""The conformance kit: what every model plugin must keep, checked on one checkpoint, item by item.

`kaminari check` prints it, `cases` hands it to an author's own pytest, and `pytest_plugin` collects it with two options. The seam
is the plugin contract itself: nothing here knows an architecture, so a third party's model is held to the same items as ours.
"""

from kaminari_core.check.cases import Case, cases
from kaminari_core.check.outcome import ConformanceError, Outcome

__all__ = ["Case", "ConformanceError", "Outcome", "cases"]
