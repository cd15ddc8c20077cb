"""Every touch on Megatron: one file for each Megatron module, saying what it changes and why."""
