"""Experiments: settings and recipes, the run loop, run folders, records, reports and figures."""
