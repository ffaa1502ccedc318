"""N-grams: a draft without a model."""
