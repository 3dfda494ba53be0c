"""UEFL as a Flower app."""
