"""Plans: tests of ``megatron_elastic.plan``."""
