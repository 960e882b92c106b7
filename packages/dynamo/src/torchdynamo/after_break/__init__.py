"""Where a program leaves the graph: the step that breaks it, and how the program goes on."""
