"""URLs of places in the servers that tests start."""

from pathlib import Path

from milepost.store import store_at


def below(url: str, name: str) -> str:
    """The URL of a place below another one, with the same settings."""
    base, _, query = url.partition("?")
    return f"{base}/{name}?{query}"


def upload(folder: Path, url: str) -> str:
    """Copy a folder, or one file, to a URL, as any tool would; gives the URL."""
    if folder.is_file():
        base, _, query = url.partition("?")
        above, _, name = base.rpartition("/")
        store_at(f"{above}?{query}").create(name, folder.read_bytes())
        return url
    store = store_at(url)
    for path in folder.rglob("*"):
        if path.is_file():
            store.create(str(path.relative_to(folder)), path.read_bytes())
    return url
