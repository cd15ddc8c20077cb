"""What policies decide that their authors published: each a script for an interpreter that can import their code.

Cases come as JSON on stdin, answers go as JSON to stdout. Nothing here imports the project, and nothing of the authors'
is copied: ``CHECKOUT`` is a clone of their repository.
"""
