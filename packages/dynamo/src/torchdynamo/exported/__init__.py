"""One whole graph of a function, to take away: called as the function is, kept in a file."""
