"""Readers: one module per file format, with the data sets that come in it."""
