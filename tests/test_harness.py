"""The helpers of the tests themselves."""

import sys

import pytest
from harness import import_or_skip


def test_a_missing_part_is_skipped_on_a_users_machine_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)  # as if it were not installed
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception):
        import_or_skip("flwr")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(ModuleNotFoundError, match="flwr"):
        import_or_skip("flwr")
