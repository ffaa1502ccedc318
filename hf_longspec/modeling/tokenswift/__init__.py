"""TokenSwift: heads on the last hidden state of the target."""
