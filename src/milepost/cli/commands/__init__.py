"""One module for each command; `milepost.cli.app` imports them when they run."""
