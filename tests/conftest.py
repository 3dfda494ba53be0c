"""One torch thread per process, since more can be many times slower on shared cores; helpers of tests in any folder."""

import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # `harness` is for the tests of every folder
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script; tests interrupt processes
    signal.signal(signal.SIGINT, signal.default_int_handler)
