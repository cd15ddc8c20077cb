"""Launch: commands, flags and scripts, and what is refused before anything starts."""
