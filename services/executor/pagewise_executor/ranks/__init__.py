"""The processes of one executor with several ranks: rank 0 leads, the others follow."""
