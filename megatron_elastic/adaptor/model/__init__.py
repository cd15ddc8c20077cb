"""What a rank computes: its stage of Megatron's model, grain by grain; parameters and groups follow the layout."""
