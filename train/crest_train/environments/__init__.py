"""Environments: multi-turn tool-use sessions with verified turn rewards."""
