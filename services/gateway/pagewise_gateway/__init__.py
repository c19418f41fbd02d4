"""The gateway service: speaks HTTP with clients, and hands their requests to the scheduler. Never loads torch."""
