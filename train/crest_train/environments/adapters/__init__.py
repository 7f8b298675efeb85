"""Environments written for other libraries, one file each: TRL, verifiers, OpenEnv."""
