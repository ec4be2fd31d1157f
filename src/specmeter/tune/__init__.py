"""The search for the fastest setting: space, planner, trials, journal, proof."""
