"""Communication: tests of ``megatron_elastic.comm``."""
