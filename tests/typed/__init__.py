"""Programs of users, for mypy; they are not run."""
