"""``pagewise bench``: a load generator for OpenAI-compatible servers."""
