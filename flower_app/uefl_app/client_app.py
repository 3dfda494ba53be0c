"""The client app of a silo. A deployed node names silo and folder: `--node-config 'silo="…" data_path="…"'`."""

from uefl.flower.client import make_client_app

app = make_client_app()
