"""Triton's interpreter runs the kernels where there is no GPU. It has to be asked for before a kernel is decorated."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
