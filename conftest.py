"""How pytest runs the notebooks: the first cell that fails ends its notebook, and only that one."""

from collections.abc import Generator

import pytest

FAILED_CELL = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Remember, with its notebook, the first cell that failed."""
    report = yield
    if report.failed and item.path.suffix == ".ipynb" and item.parent is not None:
        item.parent.stash.setdefault(FAILED_CELL, item.name)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the cells after a failed one: without what it should have made, their failures would say nothing."""
    failed = item.parent.stash.get(FAILED_CELL, None) if item.parent is not None else None
    if failed:
        pytest.skip(f"{failed} of this notebook failed")
