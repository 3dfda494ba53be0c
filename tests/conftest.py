"""One torch thread per process, since more can be many times slower on shared cores; helpers of tests in any folder."""

import os
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # `harness` is for the tests of every folder
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported: its kernels then run on a CPU
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts commands in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs that tests start would ignore Ctrl-C, too
