"""Emulation and benchmarks."""
