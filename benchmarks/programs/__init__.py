"""Training scripts of the jobs that benchmarks run."""
