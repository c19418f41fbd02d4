"""The gateway service: speaks HTTP with clients, text and tokens, and hands requests to the scheduler. Never loads torch."""
