"""A thin trainer for long-horizon multi-turn tool-use agents."""
