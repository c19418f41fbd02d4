"""How a sequence gets KV back that the device has lost: the costs, the choice of a method, and the copies."""
