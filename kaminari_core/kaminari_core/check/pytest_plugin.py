"""A pytest plugin that comes with the installation: two options collect the items for a model as tests.

    pytest --kaminari-model mymodel --kaminari-checkpoint path/to/checkpoint

Without the first option it does nothing, and imports nothing but pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kaminari_core.check.cases import Case


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options that name what to check."""
    group = parser.getgroup("kaminari", "conformance of a kaminari model")
    group.addoption(
        "--kaminari-model", metavar="NAME", help="check this model: each item of `kaminari check` is a test"
    )
    group.addoption("--kaminari-checkpoint", metavar="DIR|NAME", help="the checkpoint to check it on")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the items behind the tests that were collected, before `-k` chooses among them."""
    model = config.getoption("--kaminari-model")
    if not model:
        return
    from kaminari_core.check.cases import cases

    found = cases(model, config.getoption("--kaminari-checkpoint"))
    items += [ConformanceItem.from_parent(session, name=f"kaminari check: {case}", case=case) for case in found]


class ConformanceItem(pytest.Item):
    """One item as a test."""

    def __init__(self, *, case: Case, name: str, parent: pytest.Session) -> None:
        super().__init__(name, parent)
        self._case = case

    def runtest(self) -> None:
        """Run the item; what does not apply is skipped with the reason."""
        outcome = self._case()
        self.add_report_section("call", "kaminari", outcome.text)
        if outcome.status == "n/a":
            pytest.skip(outcome.detail)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        """The item's own words: there is no stack that would say more."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[str, None, str]:
        """Where pytest says that the test is."""
        return "kaminari check", None, self.name
