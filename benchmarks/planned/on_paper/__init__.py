"""Goodput by formula: ``megatron-elastic bench goodput``."""
