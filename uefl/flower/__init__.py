"""Federations over Flower: the engine, both ends of the wire, simulation and deployment.

Only this folder imports flwr, and no other part of the package imports this folder at module level.
"""

import os

from uefl.flower.environment import FLOWER_ENVIRONMENT

for _name, _value in FLOWER_ENVIRONMENT.items():  # set before the first import of flwr, which reads some of them once
    os.environ.setdefault(_name, _value)
