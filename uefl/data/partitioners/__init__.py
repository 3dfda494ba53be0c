"""Partitioners: they see labels, splits and domains, and return indices per silo."""
