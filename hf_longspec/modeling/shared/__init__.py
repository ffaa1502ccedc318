"""What several drafts share as a family: auxiliary hidden states, the target as its own draft, n-grams."""
