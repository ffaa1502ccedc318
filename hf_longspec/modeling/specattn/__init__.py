"""SpecAttn: the target drafts for itself."""
