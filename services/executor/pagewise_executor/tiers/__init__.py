"""The tiers of KV memory: a class and a module for each kind of place where blocks lie, behind one interface."""
