"""Measure speed, memory and traffic, with peers in the same run. `python -m benchmarks` lists the benchmarks."""
