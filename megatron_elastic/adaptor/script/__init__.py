"""What ``megatron.training`` does around its loop, for the scripts of a Megatron-LM checkout: arguments and the log."""
