"""The federation across machines, on Flower: what a silo runs, and how the server finds and reaches silos.

The engine itself is `uefl.engines.flower`. Only these files import flwr, and only when they are imported themselves.
"""

import os

from uefl.flower.quiet import QUIET

for _name, _value in QUIET.items():  # before the first import of flwr, which reads some of them only then
    os.environ.setdefault(_name, _value)
