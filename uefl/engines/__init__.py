"""Where clients run. Engines never import algorithms."""

from uefl.engines.choosing import IN_PROCESS, chosen
from uefl.engines.serial import Serial
from uefl.engines.stacked import Stacked

__all__ = ["IN_PROCESS", "Serial", "Stacked", "chosen"]
