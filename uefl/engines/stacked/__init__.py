"""The stacked engine: several clients in one tensor.

`stacked_engine.py` is the engine, `stack_trainer.py` trains a stack, and `task_runner.py` runs client tasks on it.
`client_stack.py`, `device_data.py` and `device_buffers.py` hold tensors, `stack_size.py` limits the stacks,
`silo_mapper.py` calls the methods' functions, `stacked_optimizer.py` updates weights. `two_part_tasks.py`,
`vmap_overrides.py`, `convolution.py`, `compiler.py` and `fusion/` only make it faster.
"""
