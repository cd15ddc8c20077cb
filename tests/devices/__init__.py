"""Devices and numerics: kernels, exact sums, the software accelerator."""
