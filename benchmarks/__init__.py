"""Measurements of speed, memory and traffic, peers beside us in the same run. `python -m benchmarks` lists them."""
