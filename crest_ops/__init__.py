"""Custom-kernel accelerated credit assignment and loss for agentic RL."""
