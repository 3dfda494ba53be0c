"""What a silo runs. Deployed, `--node-config 'silo="…" data="…"'` says which silo it is and where its data lie."""

from uefl.flower.client import client_app

app = client_app()
