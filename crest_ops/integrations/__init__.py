"""One trainer a module; importing a module imports its trainer."""
