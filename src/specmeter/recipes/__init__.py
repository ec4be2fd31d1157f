"""What to measure in each engine: recipes as data, and the planner that turns one into a plan."""
