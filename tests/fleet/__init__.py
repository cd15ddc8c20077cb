"""Fleets: tests of ``megatron_elastic.fleet``."""
