"""The graph under construction: what the recorder writes, and what is known of the values in it."""
