"""Node: what one launcher does for the ranks of its node, and its line to whoever coordinates."""
