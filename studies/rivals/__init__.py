"""UEFL beside FedAvg and the personalised methods: trials chosen by validation, then ten fresh seeds, paired."""
