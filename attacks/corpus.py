"""Every hostile checkpoint that we know how to make. See README.md for what must happen to them."""

from attacks import on_files, on_foreign, on_layouts, on_manifest, on_page, on_records, on_shards, on_values
from attacks.forge import Attack

ATTACKS: tuple[Attack, ...] = (
    *on_values.corpus,
    *on_files.corpus,
    *on_manifest.corpus,
    *on_records.corpus,
    *on_layouts.corpus,
    *on_shards.corpus,
    *on_foreign.corpus,
    *on_page.corpus,
)

assert len({attack.name for attack in ATTACKS}) == len(ATTACKS), "two attacks have one name"
