"""What capture knows of a call, in a form that says the same in another process."""
