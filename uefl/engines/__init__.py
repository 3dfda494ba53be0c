"""Where clients run. Engines never import algorithms."""

from uefl.engines.serial import Serial
from uefl.engines.stacked import Stacked

__all__ = ["Serial", "Stacked", "in_process"]


def in_process(name: str, device: str) -> tuple[str, type[Serial]]:
    """The engine of this name, or with `auto` the one that measurements speak for, and what it is called."""
    if name == "auto":
        # On CPU vmap makes convolutions slower; on CUDA it saves launches, and graphs save them for a single silo.
        name = "stacked" if device.startswith("cuda") else "serial"
    return name, Stacked if name == "stacked" else Serial
