"""Recording: where what happens is written down, and in which programs else it is seen."""
