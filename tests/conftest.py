"""One torch thread, as everywhere: more can be many times slower on shared cores."""

import torch

torch.set_num_threads(1)
