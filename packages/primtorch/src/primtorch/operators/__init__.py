"""What is known of each operator, one file for each family: formulas, refusals, rules into prims."""
