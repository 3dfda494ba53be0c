"""Layers that torch's compiler can fuse; only `compiler.py` uses them, through `make_layers_fusible`."""
