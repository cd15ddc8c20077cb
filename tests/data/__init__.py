"""Data: samples, their order, and who reads them."""
