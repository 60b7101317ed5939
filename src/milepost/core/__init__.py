"""The pure core: boxes, layouts, plans, manifests, shard files and trees. No torch, no I/O, no threads, no clock."""
