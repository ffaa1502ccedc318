"""The Triton kernels: docs/kernels.md explains them."""
