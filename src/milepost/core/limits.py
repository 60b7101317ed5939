"""What a reader accepts at most. A checkpoint beyond a limit is refused before anything is allocated for it."""

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

MAX_MANIFEST_BYTES = 256 * MIB
MAX_HEADER_BYTES = 100 * 1000 * 1000  # the limit of the safetensors format itself
MAX_ENTRIES = 2**19  # of one file: a shard file, a safetensors file, an archive of torch. Writers keep to it too
MAX_DIMS = 64  # torch's own limit
MAX_ELEMENTS = 2**60
MAX_DEPTH = 100
MAX_RANKS = 2**17
MAX_STRIDE = 2**16
MAX_BOXES = 2**19  # boxes of one tensor, and steps to find those of one dimension
MAX_TANGLED = 2**11  # boxes that no plane separates from each other
MAX_BLOCK_BYTES = 256 * MIB

PAGE_BYTES = 4096
BLOCK_BYTES = 64 * KIB
MIN_PART_BYTES = 1 * MIB
