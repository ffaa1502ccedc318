"""The parts of `hf-longspec serve`: what a request may say, the routes, the model's thread, and the metrics."""
