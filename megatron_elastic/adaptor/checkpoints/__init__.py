"""Checkpoints in Megatron's format: where they are, what is in them, when and how they are written."""
