"""Where clients run. Engines never import algorithms."""

from uefl.engines.serial import Serial

__all__ = ["Serial"]
