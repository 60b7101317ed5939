"""Glue for the frameworks that people train with. Each module imports its framework; nothing imports these."""
