"""The scheduler service: owns every block table, decides who runs, speaks HTTP. Never loads torch."""
