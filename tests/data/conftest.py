import pytest


@pytest.fixture(autouse=True)
def _isolate_cache(request, tmp_path_factory, monkeypatch):
    """Hide the user's cache from every test, and the user's data from all but those marked `real`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    if "real" not in request.keywords:
        monkeypatch.delenv("UEFL_DATA", raising=False)
