"""One federation, run by several frameworks; each module runs it in its own process and prints one line per round."""
