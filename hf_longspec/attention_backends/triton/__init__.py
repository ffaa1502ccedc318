"""The Triton kernels: docs/architecture.md has an overview."""
