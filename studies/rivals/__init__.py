"""UEFL beside FedAvg and the personalized methods: trials chosen by validation, then ten fresh seeds, paired."""
