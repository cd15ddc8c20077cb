"""Launching: ``megatron-elastic run``, torchrun's flags, and what is looked at before anything starts."""
