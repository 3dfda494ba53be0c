"""Where clients run. Engines never import algorithms."""

from uefl.engines.serial import Serial
from uefl.engines.stacked import Stacked

__all__ = ["Serial", "Stacked", "in_process"]


def in_process(name: str) -> tuple[str, type[Serial]]:
    """The engine of this name, or with `auto` the one that measurements speak for, and what it is called."""
    if name == "auto":
        # On CPU vmap makes convolutions slower. On CUDA stacks are many times faster, but until they were seen to give
        # the same bits every time, who wants them asks for them.
        name = "serial"
    return name, Stacked if name == "stacked" else Serial
