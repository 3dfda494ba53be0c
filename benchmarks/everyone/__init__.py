"""One federation, run by everyone: each module runs it in a process of its own and prints a line a round."""
