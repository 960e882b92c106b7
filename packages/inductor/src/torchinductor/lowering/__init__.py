"""From prims to loop IR: a table of rules by op family, and the walk over the graph."""
