"""The tiers of KV memory: a class and a module for each kind of memory that holds blocks, behind one interface."""
