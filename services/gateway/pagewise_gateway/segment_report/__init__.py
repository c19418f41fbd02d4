"""``pagewise segments``: how much of the prompts of a trace is repeated where prefixes do not reach."""
