"""One file for each rare case of targets and calls. No file of the core imports any of them."""
