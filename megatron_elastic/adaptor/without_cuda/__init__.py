"""What Megatron needs where there is no CUDA, elastic or not."""
