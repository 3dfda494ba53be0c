"""Engines: where clients run. Engines never import algorithms; listing their names imports no torch."""

from __future__ import annotations

from typing import Any

from uefl.core.registry import Entry, Registry

# In-process engines are called with silos and a network, others with an experiment; both give `Clients`.
ENGINES: Registry[Any] = Registry(
    "engine",
    {
        "serial": Entry("uefl.engines.serial:SerialEngine", "One silo after another; the reference"),
        "stacked": Entry("uefl.engines.stacked.stacked_engine:StackedEngine", "Many silos in one tensor"),
        "compiled": Entry("uefl.engines.stacked.stacked_engine:compiled_engine", "Stacked with torch.compile (CUDA)"),
        "flower": Entry("uefl.flower.simulation:simulate_clients", "One Flower client per silo"),
    },
)
IN_PROCESS_ENGINES = ("serial", "stacked", "compiled")
ENGINE_NAMES = ("auto", *ENGINES)  # auto: serial on a CPU, the fastest suitable engine on CUDA
