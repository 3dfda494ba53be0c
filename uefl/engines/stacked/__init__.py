"""The stacked engine: several clients in one tensor.

`stacked_engine.py` is the engine. `client_stack.py`, `device_data.py` and `device_buffers.py` hold its tensors,
`stack_size.py` limits its stacks, `silo_mapper.py` calls the methods' functions, `stacked_optimizer.py` updates
weights. `two_part_tasks.py`, `vmap_overrides.py`, `convolution.py`, `compiler.py` and `fusion/` only make it faster.
"""
