"""The command line `milepost`."""
