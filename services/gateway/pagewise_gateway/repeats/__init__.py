"""Finds text that prompts repeat where prefixes do not reach. It tells how much there is, and changes nothing."""
