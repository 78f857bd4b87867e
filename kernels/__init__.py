"""Kernels: Triton, each beside its plain-torch reference of the same signature. Imports nothing of `suite`."""
