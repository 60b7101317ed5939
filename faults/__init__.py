"""Faults that are really made, many times, and how Milepost and DCP meet them."""
