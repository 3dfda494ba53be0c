import pytest


@pytest.fixture(autouse=True)
def _own_cache(request, tmp_path_factory, monkeypatch):
    """No test sees the user's cache; only `real` ones see the user's data."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    if "real" not in request.keywords:
        monkeypatch.delenv("UEFL_DATA", raising=False)
