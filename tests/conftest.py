"""What holds for all tests: `--all` adds those that `make test` leaves out for their time."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the cases that are only in `make test-all`")
