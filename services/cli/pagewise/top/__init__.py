"""``pagewise top``: requests and KV memory of a running fleet, full-screen in a terminal."""
