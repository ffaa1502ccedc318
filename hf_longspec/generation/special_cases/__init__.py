"""One file for each special case of targets and calls. No file of the core imports any of them."""
