"""Layouts: tests of ``megatron_elastic.layout``."""
