"""Drafts as Hugging Face models with a config, settings and (some of them) weights."""
