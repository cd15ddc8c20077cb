"""What layers of Megatron's models do otherwise, a file for each of its modules, and what they tell."""
