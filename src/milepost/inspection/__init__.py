"""Questions about checkpoints: what is there, what differs, is it fit. Records as answers; nothing is printed here."""
