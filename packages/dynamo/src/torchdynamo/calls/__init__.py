"""What calls mean: which the graph takes, which leave it, which stand for others."""
