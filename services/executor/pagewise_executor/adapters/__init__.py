"""Adapters: layers that add them to a batch, the host that keeps them, and the slots of the device."""
