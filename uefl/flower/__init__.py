"""The federation across machines, on Flower: what a silo runs, and how the server finds and reaches silos.

The engine itself is `uefl.engines.flower`. Only these files import flwr, and only when they are imported themselves.
"""
