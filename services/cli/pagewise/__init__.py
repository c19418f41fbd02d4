"""The pagewise command: starts the services as separate processes."""
