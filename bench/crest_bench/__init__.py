"""Microbenchmarks and the code-generation report."""
