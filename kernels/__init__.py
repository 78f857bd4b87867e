"""Kernels: Triton, each beside its plain-torch reference of the same signature. Imports nothing of `suite`."""
import torch

DTYPES = (torch.bfloat16, torch.float32)  # that kernels read and write
