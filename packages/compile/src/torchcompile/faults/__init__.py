"""Finding the fault: which stage computes something else than eager, from which operator on, and in how few lines."""
