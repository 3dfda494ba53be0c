"""Engines: where clients run. Engines never import algorithms; listing their names imports no torch."""

from __future__ import annotations

from typing import Any

from uefl.core.registry import Entry, Registry

# In-process engines are called with silos and a network, others with an experiment; both give `Clients`.
ENGINES: Registry[Any] = Registry(
    "engine",
    {
        "serial": Entry("uefl.engines.serial:SerialEngine", "One silo after another; the reference"),
        "processes": Entry(
            "uefl.engines.processes.process_engine:ProcessEngine", "Silos spread over processes, one per core (CPU)"
        ),
        "stacked": Entry("uefl.engines.stacked.stacked_engine:StackedEngine", "Many silos in one tensor"),
        "compiled": Entry("uefl.engines.stacked.stacked_engine:compiled_engine", "Stacked with torch.compile (CUDA)"),
        "flower": Entry("uefl.flower.simulation:simulate_clients", "One Flower client per silo"),
    },
)
IN_PROCESS_ENGINES = ("serial", "processes", "stacked", "compiled")  # `processes` starts workers of its own
SAME_BITS_ENGINES = ("serial", "processes")  # a run of one can be resumed with the other
ENGINE_NAMES = ("auto", *ENGINES)  # auto: serial or processes on a CPU, the fastest suitable engine on CUDA
