"""Distributed: groups as ``torch.distributed`` calls them."""
