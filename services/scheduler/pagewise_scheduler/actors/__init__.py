"""Actors: the fleet, one engine per executor, the router."""
