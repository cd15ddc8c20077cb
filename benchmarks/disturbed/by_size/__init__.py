"""Recovery by size of the model, and what it takes otherwise: ``megatron-elastic bench recovery --params ...``."""
