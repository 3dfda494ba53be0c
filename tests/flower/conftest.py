import pytest

pytest.importorskip("flwr")
