"""The server app of the coordinator."""

from uefl.flower.server import make_server_app

app = make_server_app()
