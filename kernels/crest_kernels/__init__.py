"""Triton kernels over vocabulary logits and token spans. Imports torch and triton only."""
