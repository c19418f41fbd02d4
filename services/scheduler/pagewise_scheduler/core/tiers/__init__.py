"""How a sequence gets KV back that the device has lost: what it costs, what is chosen, and how it is carried out."""
