"""Under fire: jobs that random faults happen to: ``megatron-elastic chaos``."""
