"""What the coordinator runs."""

from uefl.flower.server import server_app

app = server_app()
