"""What the classes for Lightning share, whichever of its packages they are for. Imports none of them."""
