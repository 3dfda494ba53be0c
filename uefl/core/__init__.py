"""Values and protocol of a federation, and the computations that every floor uses."""
