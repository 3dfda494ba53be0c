"""Federated learning across silos whose data do not look alike."""
