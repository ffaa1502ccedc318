"""Attention for speculative decoding at long context: tensors in, tensors out."""
