"""Rollout engines: what writes for the policy. One file each, all with the interface of protocol.py."""
