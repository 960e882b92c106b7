"""Generated Python source of the compiled function."""
