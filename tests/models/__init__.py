"""Models: what a ``GPTModel`` can be, and that the numbers are right."""
