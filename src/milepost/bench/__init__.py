"""What a place gives, and what Milepost makes of it: raw reads and writes beside saves and loads."""
