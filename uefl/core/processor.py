"""The name of the processor: with another one, a run may end with other bits."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def describe_processor() -> str:
    """Return the model of the CPU and the vector instructions that torch uses on it."""
    return f"{get_cpu_name()}, {torch.backends.cpu.get_cpu_capability()}"


def get_cpu_name() -> str:
    """Return the model name of the CPU."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
