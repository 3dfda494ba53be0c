"""Silos of one run in worker processes.

`process_engine.py` decides which silo runs when, `worker_pool.py` starts and ends processes, and `worker_process.py`
runs in each of them. `shared_tensors.py` and `channel.py` carry values between them.
"""
