"""Steps of fixed shapes: compiled, captured and fused."""
